//! Downloads by the command, from a Hub that is a process of this test and speaks TLS.

use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use crate::support::Folder;

/// A process that ends with this.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A certificate for `localhost`; none, and a warning, where there is no `openssl`.
fn certificate(folder: &Folder) -> Option<()> {
    let (key, certificate) = (folder.path("key.pem"), folder.path("certificate.pem"));
    let mut make = Command::new("openssl");
    make.args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]);
    make.args(["-addext", "subjectAltName=DNS:localhost", "-keyout", &key, "-out", &certificate]);
    match make.output() {
        Ok(made) => assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr)),
        Err(_) => eprintln!("warning: no `openssl`: redirects from HTTPS are not tested"),
    }
    std::fs::exists(&certificate).unwrap().then_some(())
}

/// A server of the answers that are files of a folder, by TLS.
fn serve(folder: &Folder) -> (Running, u16) {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut server = Command::new("openssl");
    server.args(["s_server", "-HTTP", "-quiet", "-accept", &free.to_string(), "-cert", "certificate.pem"]);
    server.args(["-key", "key.pem"]).current_dir(folder.path("")).stdin(Stdio::null());
    let running = Running(server.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    for _ in 0..200 {
        if TcpStream::connect(("localhost", free)).is_ok() {
            break;
        }
        sleep(Duration::from_millis(25));
    }
    (running, free)
}

/// A server that counts who asks it, and answers nothing.
fn counted() -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, asked) = (listener.local_addr().unwrap().port(), Arc::new(AtomicUsize::new(0)));
    let count = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut line = String::new();
            let _ = BufReader::new(stream.unwrap()).read_line(&mut line);
            count.fetch_add(1, Ordering::SeqCst);
        }
    });
    (port, asked)
}

#[test]
fn redirects_from_https_to_http_are_refused() {
    let folder = Folder::new();
    if certificate(&folder).is_none() {
        return;
    }
    let (plain, asked) = counted();
    let api = "api/models/someone/tiny/revision";
    std::fs::create_dir_all(folder.path(api)).unwrap();
    let to = format!("http://localhost:{plain}/x");
    let redirect = format!("HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    for name in ["main", "main?blobs=true"] {
        folder.write(&format!("{api}/{name}"), &redirect);
    }
    let (_running, port) = serve(&folder);
    let mut command = folder.command(&["generate", "hi", "--model", "someone/tiny", "--download"]);
    command.env("HF_ENDPOINT", format!("https://localhost:{port}")).env("HF_HUB_CACHE", folder.path("cache"));
    let done = command.env("CURL_CA_BUNDLE", folder.path("certificate.pem")).output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(!done.status.success());
    assert_eq!(asked.load(Ordering::SeqCst), 0, "{said}");
    assert!(said.contains("Protocol \"http\""), "{said}");
}
