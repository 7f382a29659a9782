//! Downloads one file with `curl`: checked during the transfer, and renamed to its final name only if all of it is right.
//!
//! `curl` writes to a pipe and this process to the file, so that no process writes to the file after this one was killed.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::Duration;

use deuteron::report::Sha256;

use crate::download::{DownloadError, unwritten};

/// Retries after temporary failures of the server or the network.
const RETRIES: u32 = 3;
/// Delay before the first retry; doubled before each further one.
const PAUSE: Duration = Duration::from_millis(200);
/// Exit codes of curl that a retry may fix: no address, connection lost, timeout, no answer, send or receive error.
const TRANSIENT: [i32; 6] = [6, 18, 28, 52, 55, 56];
/// curl's exit code if a server does not support ranges.
const NO_RANGES: i32 = 33;
/// Maximum length of a header line.
const LONGEST_LINE: u64 = 1 << 16;

/// What is known about a file before it is fetched.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Expected {
    pub bytes: Option<u64>,
    /// 64 digits, in small letters
    pub sha256: Option<String>,
}

/// A URL.
pub(crate) struct Source<'a> {
    pub url: String,
    pub token: Option<&'a str>,
}

/// What a response says about its body.
#[derive(Default)]
struct Head {
    status: u16,
    bytes: Option<u64>,
    /// whether the end of the body is marked without a length
    framed: bool,
    sha256: Option<String>,
}

/// An attempt that failed.
struct Failure {
    error: DownloadError,
    remedy: Remedy,
}

/// What may fix a failure.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Remedy {
    Nothing,
    /// a retry
    Again,
    /// a retry from the start
    Afresh,
}

impl From<DownloadError> for Failure {
    fn from(error: DownloadError) -> Failure {
        Failure { error, remedy: Remedy::Nothing }
    }
}

impl Source<'_> {
    /// The body at a URL, if it has at most `most` bytes.
    pub fn bytes(&self, most: u64) -> Result<Vec<u8>, DownloadError> {
        self.repeated(|| {
            let mut bytes = Vec::new();
            let mut transfer = Transfer::start(self, 0)?;
            let read = transfer.body.by_ref().take(most + 1).read_to_end(&mut bytes);
            read.map_err(|error| self.failed(error))?;
            if bytes.len() as u64 > most {
                return Err(self.failed(format!("expected at most {most} bytes, got more")).into());
            }
            let head = transfer.finish(self)?;
            self.check_size(&Expected::default(), &head, bytes.len() as u64, 0)?;
            Ok(bytes)
        })
    }

    /// Downloads a URL into a folder. The caller holds the lock of the folder.
    pub fn file(&self, folder: &Path, name: &str, expected: &Expected) -> Result<(), DownloadError> {
        let part = folder.join(format!(".{name}.part"));
        self.repeated(|| self.attempt(&part, expected))?;
        let path = folder.join(name);
        fs::rename(&part, &path).map_err(|error| unwritten(&path, &error))
    }

    fn repeated<T>(&self, attempt: impl Fn() -> Result<T, Failure>) -> Result<T, DownloadError> {
        for retry in 0..RETRIES {
            match attempt() {
                Err(Failure { remedy: Remedy::Again, .. }) => sleep(PAUSE * (1 << retry)),
                Err(Failure { remedy: Remedy::Afresh, .. }) => (),
                done => return done.map_err(|failure| failure.error),
            }
        }
        attempt().map_err(|failure| failure.error)
    }

    /// Fetches the file, or the rest of a partial one if a digest will verify it.
    fn attempt(&self, path: &Path, expected: &Expected) -> Result<(), Failure> {
        let mut part = Part::open(path, expected)?;
        let from = part.bytes;
        let done = self.fill(&mut part, expected);
        match done {
            Ok(()) => Ok(part.file.sync_all().map_err(|error| unwritten(path, &error))?),
            Err(Failure { error, mut remedy }) => {
                let is_wrong = matches!(error, DownloadError::Size { .. } | DownloadError::Digest { .. });
                if is_wrong && from > 0 {
                    remedy = Remedy::Afresh;
                }
                if is_wrong || remedy == Remedy::Afresh || expected.sha256.is_none() {
                    // The first error is the one to report; the next attempt removes what it cannot use.
                    let _ = fs::remove_file(path);
                }
                Err(Failure { error, remedy })
            }
        }
    }

    fn fill(&self, part: &mut Part, expected: &Expected) -> Result<(), Failure> {
        let from = part.bytes;
        let mut head = Head { bytes: Some(0), ..Head::default() };
        if expected.bytes != Some(from) || from == 0 {
            let mut transfer = Transfer::start(self, from)?;
            part.take(self, &mut transfer.body, expected.bytes)?;
            head = transfer.finish(self)?;
        }
        self.check_size(expected, &head, part.bytes, from)?;
        if let Some(wanted) = expected.sha256.as_ref().or(head.sha256.as_ref()) {
            let digest = part.digest.clone().finish();
            let got: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            if got != *wanted {
                return Err(DownloadError::Digest { url: self.url.clone(), expected: wanted.clone(), got }.into());
            }
        }
        Ok(())
    }

    /// Checks the number of bytes, of which the first `from` were there before.
    fn check_size(&self, expected: &Expected, head: &Head, got: u64, from: u64) -> Result<(), DownloadError> {
        let announced = head.bytes.map(|bytes| bytes + from);
        for bytes in [expected.bytes, announced].into_iter().flatten() {
            if bytes != got {
                return Err(DownloadError::Size { url: self.url.clone(), expected: bytes, got });
            }
        }
        if expected.bytes.is_none() && announced.is_none() && !head.framed {
            return Err(
                self.failed("the server does not state its length, so a truncated download could not be detected")
            );
        }
        Ok(())
    }

    fn failed(&self, words: impl ToString) -> DownloadError {
        DownloadError::Fetch { url: self.url.clone(), words: words.to_string() }
    }

    /// The allowed protocols of a URL and its redirects: an HTTPS request is never redirected to another protocol.
    fn protocols(&self) -> &'static str {
        let scheme = self.url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
        if scheme.as_deref() == Some("http") { "=http,https" } else { "=https" }
    }

    fn command(&self, from: u64) -> Command {
        let mut curl = Command::new("curl");
        curl.args(["--fail", "--silent", "--show-error", "--location", "--include", "--suppress-connect-headers"]);
        curl.args(["--connect-timeout", "20", "--proto", self.protocols(), "--proto-redir", self.protocols()]);
        if from > 0 {
            curl.args(["--continue-at", &from.to_string()]);
        }
        curl.args(["--config", "-", "--", &self.url]);
        curl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        curl
    }
}

/// A partial file, with the digest of its bytes.
struct Part {
    path: PathBuf,
    file: File,
    bytes: u64,
    digest: Sha256,
}

impl Part {
    /// The partial file of an earlier attempt if a digest will verify it, otherwise a new file.
    fn open(path: &Path, expected: &Expected) -> Result<Part, DownloadError> {
        let wrong = |error| unwritten(path, &error);
        let left = fs::symlink_metadata(path).ok();
        let is_useful = |left: &fs::Metadata| {
            left.is_file() && expected.sha256.is_some() && expected.bytes.is_none_or(|bytes| left.len() <= bytes)
        };
        if !left.as_ref().is_some_and(is_useful) {
            if left.is_some() {
                fs::remove_file(path).map_err(wrong)?;
            }
            let file = OpenOptions::new().write(true).create_new(true).open(path).map_err(wrong)?;
            return Ok(Part { path: path.to_path_buf(), file, bytes: 0, digest: Sha256::new() });
        }
        let file = OpenOptions::new().read(true).append(true).open(path).map_err(wrong)?;
        let mut part = Part { path: path.to_path_buf(), file, bytes: 0, digest: Sha256::new() };
        let mut buffer = vec![0; 1 << 16];
        loop {
            match part.file.read(&mut buffer).map_err(wrong)? {
                0 => return Ok(part),
                count => {
                    part.digest.update(&buffer[..count]);
                    part.bytes += count as u64;
                }
            }
        }
    }

    /// Reads a body to its end, unless it is too long.
    fn take(&mut self, source: &Source, body: &mut impl Read, most: Option<u64>) -> Result<(), DownloadError> {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let count = body.read(&mut buffer).map_err(|error| source.failed(error))?;
            if count == 0 {
                return Ok(());
            }
            self.bytes += count as u64;
            if let Some(expected) = most.filter(|&most| self.bytes > most) {
                return Err(DownloadError::Size { url: source.url.clone(), expected, got: self.bytes });
            }
            self.digest.update(&buffer[..count]);
            self.file.write_all(&buffer[..count]).map_err(|error| unwritten(&self.path, &error))?;
        }
    }
}

/// A running curl process, killed on drop.
struct Transfer {
    child: Child,
    head: Head,
    body: BufReader<ChildStdout>,
}

impl Transfer {
    /// Requests a URL from some byte on, and reads the response headers.
    fn start(source: &Source, from: u64) -> Result<Transfer, Failure> {
        let mut child = source.command(from).spawn().map_err(|error| DownloadError::NoCurl(error.to_string()))?;
        if let (Some(mut stdin), Some(token)) = (child.stdin.take(), source.token) {
            // Through a pipe, where other users of the machine do not see it. If curl is gone already, its code tells.
            let quoted = token.replace('\\', "\\\\").replace('"', "\\\"").replace(['\n', '\r'], "");
            let _ = stdin.write_all(format!("header = \"Authorization: Bearer {quoted}\"\n").as_bytes());
        }
        let stdout = child.stdout.take().ok_or_else(|| source.failed("curl gave no output"))?;
        let mut transfer = Transfer { child, head: Head::default(), body: BufReader::new(stdout) };
        transfer.head = heads(&mut transfer.body).map_err(|error| source.failed(error))?;
        let is_body = if from > 0 { transfer.head.status == 206 } else { (200..300).contains(&transfer.head.status) };
        if !is_body {
            let status = transfer.head.status;
            transfer.finish(source)?;
            return Err(source.failed(format!("expected an answer with a body, got status {status}")).into());
        }
        Ok(transfer)
    }

    /// Waits for the end, and returns the response headers.
    fn finish(mut self, source: &Source) -> Result<Head, Failure> {
        // The rest is not our body; curl must not wait for a reader.
        let _ = std::io::copy(&mut self.body, &mut std::io::sink());
        let mut words = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut words);
        }
        let done = self.child.wait().map_err(|error| source.failed(error))?;
        let head = std::mem::take(&mut self.head);
        if done.success() {
            return Ok(head);
        }
        Err(Failure { error: source.failed(words.trim()), remedy: remedy(done, head.status) })
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        // One that has ended already is neither.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What may fix a failure of curl.
fn remedy(done: ExitStatus, status: u16) -> Remedy {
    match (done.code().unwrap_or_default(), status) {
        (NO_RANGES, _) | (_, 416) => Remedy::Afresh,
        (_, 408 | 429 | 500 | 502 | 503 | 504) => Remedy::Again,
        (code, _) if TRANSIENT.contains(&code) => Remedy::Again,
        _ => Remedy::Nothing,
    }
}

/// The headers of all responses up to the one with the body, or of the last one.
fn heads(answer: &mut impl BufRead) -> std::io::Result<Head> {
    let mut last = Head::default();
    while let Some(head) = head(answer)? {
        // The Hub names the digest where it leads to the file, and not where the file is.
        let sha256 = head.sha256.clone().or(last.sha256);
        last = Head { sha256, ..head };
        if (200..300).contains(&last.status) {
            break;
        }
    }
    Ok(last)
}

/// The next headers.
fn head(answer: &mut impl BufRead) -> std::io::Result<Option<Head>> {
    let mut head: Option<Head> = None;
    loop {
        let mut line = Vec::new();
        answer.take(LONGEST_LINE).read_until(b'\n', &mut line)?;
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if text.is_empty() {
            return Ok(head);
        }
        let head = head.get_or_insert_default();
        if let Some(version) = text.strip_prefix("HTTP/") {
            head.status = version.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or_default();
            head.framed = !version.starts_with("1.");
        }
        let Some((name, value)) = text.split_once(':') else { continue };
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => head.bytes = value.parse().ok(),
            "transfer-encoding" => head.framed |= value.eq_ignore_ascii_case("chunked"),
            "x-linked-etag" => head.sha256 = sha256(value.trim_matches('"')),
            _ => (),
        }
    }
}

/// A digest, if that is what a text is.
pub(crate) fn sha256(text: &str) -> Option<String> {
    let is_digest = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_digest.then(|| text.to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_by_https_comes_by_nothing_else() {
        let protocols = |url: &str| Source { url: url.into(), token: None }.protocols();
        assert_eq!(protocols("https://huggingface.co/gpt2"), "=https");
        assert_eq!(protocols("HTTPS://huggingface.co/gpt2"), "=https");
        assert_eq!(protocols("huggingface.co/gpt2"), "=https");
        assert_eq!(protocols("http://127.0.0.1/gpt2"), "=http,https");
        let command = Source { url: "https://huggingface.co/gpt2".into(), token: None }.command(0);
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        for option in ["--proto", "--proto-redir"] {
            assert!(words.windows(2).any(|pair| pair == [option, "=https"]), "{option} in {words:?}");
        }
    }

    #[test]
    fn the_digest_of_a_redirect_is_that_of_the_file() {
        let digest = "AB".repeat(32);
        let answer = format!(
            "HTTP/1.1 302 Found\r\nX-Linked-Etag: \"{digest}\"\r\nContent-Length: 9\r\n\r\n\
             HTTP/2 200\r\ncontent-length: 3\r\netag: \"x\"\r\n\r\nabc"
        );
        let mut rest = answer.as_bytes();
        let head = heads(&mut rest).unwrap();
        assert_eq!((head.status, head.bytes, head.framed), (200, Some(3), true));
        assert_eq!(head.sha256, Some(digest.to_lowercase()));
        assert_eq!(rest, b"abc");
    }
}
