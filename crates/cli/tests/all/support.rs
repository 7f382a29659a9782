//! The command in a folder of its own: settings and models of the user who runs the tests are neither read nor written.

use std::process::{Command, Output};

use deuteron_testkit::Scratch;

/// Settings and files of a test live in it.
pub struct Folder(pub Scratch);

impl Folder {
    pub fn new() -> Folder {
        Folder(Scratch::make())
    }

    pub fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_string()
    }

    pub fn write(&self, name: &str, contents: &(impl AsRef<[u8]> + ?Sized)) -> String {
        std::fs::write(self.0.join(name), contents).unwrap();
        self.path(name)
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deuteron"));
        command.args(arguments).env("XDG_CONFIG_HOME", self.0.join("settings")).env("HF_HUB_CACHE", self.0.join("hub"));
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// The same with NVRTC, where the tests have it.
    pub fn run_with_nvrtc(&self, arguments: &[&str]) -> Output {
        let environment = std::env::var_os("DEUTERON_NVRTC_ENV").map(|environment| ("VIRTUAL_ENV", environment));
        self.command(arguments).envs(environment).output().unwrap()
    }
}

/// What the command prints, if it ends well.
pub fn printed(output: Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}
