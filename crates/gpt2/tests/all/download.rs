//! Downloads from a Hub that is a thread of this test.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use crate::support::{Scratch, fixture};
use deuteron::report::Sha256;
use deuteron_gpt2::{Checkpoint, DownloadError, Hub, find_model};
use deuteron_testkit::drill;

const REVISION: &str = "607a30d783dfa663caf39e06633721c8d4cfcd7e";

/// What a server answers.
#[derive(Clone)]
struct Reply {
    status: &'static str,
    headers: Vec<String>,
    body: Vec<u8>,
    /// whether it goes on from the middle where it is asked to
    ranges: bool,
}

impl Reply {
    fn of(body: Vec<u8>) -> Reply {
        Reply { status: "200 OK", headers: vec![format!("Content-Length: {}", body.len())], body, ranges: true }
    }

    /// The head and the body of the answer to a request.
    fn written(&self, request: &[String]) -> Vec<u8> {
        let range =
            request.iter().find_map(|line| line.to_ascii_lowercase().strip_prefix("range: bytes=").map(str::to_string));
        let from: usize = range.map_or(0, |range| range.trim_end_matches('-').parse().unwrap());
        let (status, headers, body) = match (from, self.ranges) {
            (0, _) | (_, false) => (self.status, self.headers.clone(), &self.body[..]),
            _ if from >= self.body.len() => ("416 Range Not Satisfiable", vec!["Content-Length: 0".into()], &[][..]),
            _ => {
                let (rest, all) = (&self.body[from..], self.body.len());
                let range = format!("Content-Range: bytes {from}-{}/{all}", all - 1);
                ("206 Partial Content", vec![format!("Content-Length: {}", rest.len()), range], rest)
            }
        };
        let headers: String = headers.iter().flat_map(|header| [header, "\r\n"]).collect();
        [format!("HTTP/1.1 {status}\r\n{headers}Connection: close\r\n\r\n").as_bytes(), body].concat()
    }
}

type Replies = HashMap<String, Reply>;

/// A server of files by path, which writes down what it was asked for. It ends with the process.
fn serve(replies: Replies) -> (Hub, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = asked.clone();
    let answer = move |mut stream: TcpStream| {
        let lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let lines: Vec<String> = lines.map(Result::unwrap).take_while(|line| !line.is_empty()).collect();
        let path = lines[0].split([' ', '?']).nth(1).unwrap().to_string();
        let allowed = lines.iter().any(|line| line.eq_ignore_ascii_case("authorization: bearer let \"me\" in"));
        let ranged = lines.iter().any(|line| line.to_ascii_lowercase().starts_with("range:"));
        let marks = [(allowed, " with token"), (ranged, " from the middle")];
        let marks: String = marks.iter().filter(|(is_so, _)| *is_so).map(|(_, mark)| *mark).collect();
        log.lock().unwrap().push(format!("{path}{marks}"));
        let unknown = Reply { status: "404 Not Found", ..Reply::of(b"no".to_vec()) };
        let written = replies.get(&path).unwrap_or(&unknown).written(&lines);
        for piece in written.chunks(1 << 14) {
            // A client that is satisfied early is none of our concern.
            let _ = stream.write_all(piece);
            sleep(Duration::from_millis(1));
        }
    };
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, answer) = (stream.unwrap(), answer.clone());
            std::thread::spawn(move || answer(stream));
        }
    });
    (Hub { endpoint, token: None }, asked)
}

/// A repository as the Hub describes it, with the files of a fixture.
fn repository(name: &str, revision: &str, listed: &[&str]) -> Replies {
    described(name, revision, listed, |_| String::new())
}

/// The same with what the Hub says of each file beside its name.
fn described(name: &str, revision: &str, listed: &[&str], says: impl Fn(&[u8]) -> String) -> Replies {
    let mut replies = HashMap::new();
    let mut siblings = Vec::new();
    for file in listed {
        let bytes = std::fs::read(fixture("gelu").join(file));
        let said = bytes.as_deref().map(&says).unwrap_or_default();
        siblings.push(format!(r#"{{"rfilename":"{file}"{said}}}"#));
        if let Ok(bytes) = bytes {
            replies.insert(format!("/{name}/resolve/{revision}/{file}"), Reply::of(bytes));
        }
    }
    let answer = format!(r#"{{"sha":"{revision}","siblings":[{}]}}"#, siblings.join(","));
    replies.insert(format!("/api/models/{name}/revision/main"), Reply::of(answer.into_bytes()));
    replies
}

/// A model whose sizes and digests the Hub knows.
fn known() -> Replies {
    described("someone/tiny", REVISION, &FILES, |bytes| {
        let mut digest = Sha256::new();
        digest.update(bytes);
        let digest: String = digest.finish().iter().map(|byte| format!("{byte:02x}")).collect();
        format!(r#","size":{},"lfs":{{"sha256":"{digest}"}}"#, bytes.len())
    })
}

const WEIGHTS: &str = "model.safetensors";

fn weights() -> Vec<u8> {
    std::fs::read(fixture("gelu").join(WEIGHTS)).unwrap()
}

/// The path of the weights on the server.
fn weights_path() -> String {
    format!("/someone/tiny/resolve/{REVISION}/{WEIGHTS}")
}

/// Where files of the model go.
fn snapshot(cache: &Scratch) -> PathBuf {
    cache.0.join("models--someone--tiny").join("snapshots").join(REVISION)
}

/// Names of the files in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = entries.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

const FILES: [&str; 4] = ["README.md", "config.json", "model.safetensors", "tokenizer.json"];

#[test]
fn a_model_is_fetched_once_and_then_found() {
    let (hub, asked) = serve(repository("openai-community/gpt2", REVISION, &FILES));
    let hub = Hub { token: Some("let \"me\" in".into()), ..hub };
    let cache = Scratch::new();
    let mut started = Vec::new();
    let folder = hub.download("gpt2", &cache.0, |file| started.push(file.to_string())).unwrap();
    assert_eq!(started, FILES[1..]);
    assert_eq!(find_model("gpt2", Some(&cache.0)), Ok(folder.clone()));
    assert_eq!(Checkpoint::open(&folder).unwrap().config().vocabulary, 320);
    assert!(asked.lock().unwrap().iter().all(|path| path.ends_with(" with token")));
    let before = asked.lock().unwrap().len();
    hub.download("gpt2", &cache.0, |file| panic!("{file} again")).unwrap();
    assert_eq!(asked.lock().unwrap().len(), before + 1);
}

#[test]
fn a_download_that_breaks_off_leaves_no_model() {
    let mut files = repository("someone/tiny", REVISION, &FILES);
    files.remove(&format!("/someone/tiny/resolve/{REVISION}/model.safetensors"));
    let (hub, _) = serve(files);
    let cache = Scratch::new();
    let error = hub.download("someone/tiny", &cache.0, |_| ()).unwrap_err();
    let DownloadError::Fetch { url, words } = &error else { panic!("{error}") };
    assert!(url.ends_with("/model.safetensors") && words.contains("404"), "{error}");
    assert!(find_model("someone/tiny", Some(&cache.0)).is_err());
}

#[test]
fn answers_that_are_none_are_errors() {
    let cache = Scratch::new();
    let fails = |files: Replies, words: &str| {
        let error = serve(files).0.download("someone/tiny", &cache.0, |_| ()).unwrap_err().to_string();
        assert!(error.contains(words), "`{words}` is missing in {error}");
    };
    fails(HashMap::new(), "404");
    fails(
        HashMap::from([("/api/models/someone/tiny/revision/main".into(), Reply::of(b"<html>".to_vec()))]),
        "cannot be parsed",
    );
    fails(repository("someone/tiny", "../../x", &FILES), "not a revision");
    fails(repository("someone/tiny", REVISION, &["config.json", "pytorch_model.bin"]), "no model.safetensors");
    let hub = Hub { endpoint: "http://127.0.0.1:9".into(), token: None };
    assert!(matches!(hub.download("../x", &cache.0, |_| ()), Err(DownloadError::Name(_))));
    assert!(matches!(hub.download("gpt2", &cache.0, |_| ()), Err(DownloadError::Fetch { .. })));
    assert!(!cache.0.join("models--someone--tiny").exists());
}

#[test]
fn downloads_at_once_fetch_each_file_once() {
    for replies in [known(), repository("someone/tiny", REVISION, &FILES)] {
        let (hub, asked) = serve(replies);
        let cache = Scratch::new();
        std::thread::scope(|scope| {
            let download = || hub.download("someone/tiny", &cache.0, |_| ()).unwrap();
            let all: Vec<_> = (0..8).map(|_| scope.spawn(download)).collect();
            for one in all {
                assert_eq!(one.join().unwrap(), snapshot(&cache));
            }
        });
        assert_eq!(names(&snapshot(&cache)), &FILES[1..]);
        for file in &FILES[1..] {
            assert_eq!(
                std::fs::read(snapshot(&cache).join(file)).unwrap(),
                std::fs::read(fixture("gelu").join(file)).unwrap()
            );
            let times = asked.lock().unwrap().iter().filter(|path| path.ends_with(&format!("/{file}"))).count();
            assert_eq!(times, 1, "{file}");
        }
    }
}

/// A server that gives a wrong body for the weights: an error, and nothing under their name. A good one mends it.
fn is_refused(mut replies: Replies, reply: Reply, fits: impl Fn(&DownloadError) -> bool) {
    let cache = Scratch::new();
    replies.insert(weights_path(), reply);
    let error = serve(replies).0.download("someone/tiny", &cache.0, |_| ()).unwrap_err();
    assert!(fits(&error), "{error}");
    assert!(!snapshot(&cache).join(WEIGHTS).exists());
    assert!(find_model("someone/tiny", Some(&cache.0)).is_err());
    serve(known()).0.download("someone/tiny", &cache.0, |_| ()).unwrap();
    assert_eq!(std::fs::read(snapshot(&cache).join(WEIGHTS)).unwrap(), weights());
    assert_eq!(names(&snapshot(&cache)), &FILES[1..]);
}

#[test]
fn truncated_bodies_are_errors() {
    let (whole, plain) = (weights(), repository("someone/tiny", REVISION, &FILES));
    let half = whole[..whole.len() / 2].to_vec();
    // Cut off before the length that was announced, from which it does not go on.
    let cut = Reply { body: half.clone(), ranges: false, ..Reply::of(whole) };
    let is_fetch = |error: &DownloadError| matches!(error, DownloadError::Fetch { .. });
    is_refused(plain.clone(), cut.clone(), is_fetch);
    is_refused(known(), cut, |error| is_fetch(error) || matches!(error, DownloadError::Size { .. }));
    // No length at all.
    let open = Reply { headers: Vec::new(), ..Reply::of(half) };
    is_refused(plain, open.clone(), |error| error.to_string().contains("does not state its length"));
    is_refused(known(), open, |error| matches!(error, DownloadError::Size { .. }));
}

#[test]
fn bodies_of_another_size_or_digest_are_errors() {
    let is_size = |error: &DownloadError| matches!(error, DownloadError::Size { .. });
    is_refused(known(), Reply::of(weights()[1..].to_vec()), is_size);
    is_refused(known(), Reply::of([weights(), vec![0]].concat()), is_size);
    let mut other = weights();
    other[100] ^= 1;
    let is_digest = |error: &DownloadError| matches!(error, DownloadError::Digest { .. });
    is_refused(known(), Reply::of(other.clone()), is_digest);
    // A digest that the server tells, where the Hub did not.
    let mut linked = Reply::of(other);
    linked.headers.push(format!("X-Linked-ETag: \"{}\"", "0".repeat(64)));
    is_refused(repository("someone/tiny", REVISION, &FILES), linked, is_digest);
}

#[test]
fn what_killed_downloads_left_does_no_harm() {
    let whole = weights();
    let half = whole.len() / 2;
    let wrong: Vec<u8> = whole.iter().map(|byte| !byte).collect();
    let longer = [&whole[..], b"more"].concat();
    let goes_on = format!("{} from the middle", weights_path());
    for (left, resumed) in [
        (&whole[..half], true),
        (&wrong[..half], true),
        (&whole[..], false),
        (&wrong[..], false),
        (&longer[..], false),
        (&[], false),
    ] {
        for ranges in [true, false] {
            let mut replies = known();
            replies.insert(weights_path(), Reply { ranges, ..Reply::of(whole.clone()) });
            let (hub, asked) = serve(replies);
            let cache = Scratch::new();
            std::fs::create_dir_all(snapshot(&cache)).unwrap();
            std::fs::write(snapshot(&cache).join(format!(".{WEIGHTS}.part")), left).unwrap();
            hub.download("someone/tiny", &cache.0, |_| ()).unwrap();
            assert_eq!(std::fs::read(snapshot(&cache).join(WEIGHTS)).unwrap(), whole);
            assert_eq!(names(&snapshot(&cache)), &FILES[1..]);
            assert_eq!(asked.lock().unwrap().contains(&goes_on), resumed);
        }
    }
}

#[test]
fn a_file_of_another_size_is_fetched_again() {
    let cache = Scratch::new();
    std::fs::create_dir_all(snapshot(&cache)).unwrap();
    std::fs::write(snapshot(&cache).join(WEIGHTS), &weights()[..1000]).unwrap();
    serve(known()).0.download("someone/tiny", &cache.0, |_| ()).unwrap();
    assert_eq!(std::fs::read(snapshot(&cache).join(WEIGHTS)).unwrap(), weights());
}

/// Set for a process that this file starts: the Hub, and the cache that it downloads to.
const TASK: &str = "DEUTERON_DOWNLOAD_TASK";

/// A process that downloads. What a shell does first, it does in the same process.
fn downloading(hub: &Hub, cache: &Scratch, first: &str) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{first} ; exec \"$0\" \"$@\"")).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "download::task_of_a_child", "--nocapture"]);
    command.env(TASK, format!("{} {}", hub.endpoint, cache.0.display())).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Not a test by itself: what the processes started here run.
#[test]
fn task_of_a_child() {
    let Ok(order) = std::env::var(TASK) else { return };
    let (endpoint, cache) = order.split_once(' ').unwrap();
    let hub = Hub { endpoint: endpoint.into(), token: None };
    if let Err(error) = hub.download("someone/tiny", Path::new(cache), |_| ()) {
        assert!(matches!(error, DownloadError::Write { .. }), "{error}");
        std::process::exit(7);
    }
}

/// Whatever has its name is right.
fn is_whole(cache: &Scratch) {
    let Ok(entries) = std::fs::read_dir(snapshot(cache)) else { return };
    for name in entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()) {
        if !name.starts_with('.') {
            let got = std::fs::read(snapshot(cache).join(&name)).unwrap();
            assert!(got == std::fs::read(fixture("gelu").join(&name)).unwrap(), "{name} of {} bytes", got.len());
        }
    }
}

#[cfg(unix)]
#[test]
fn killed_downloads_leave_no_bad_file() {
    let (hub, _) = serve(known());
    let rounds = drill::times(15);
    let (mut cache, mut parts) = (Scratch::new(), 0);
    for round in 0..rounds {
        let mut child = downloading(&hub, &cache, ":").spawn().unwrap();
        sleep(Duration::from_micros((round * 7919 % 97_000) as u64));
        child.kill().unwrap();
        child.wait().unwrap();
        is_whole(&cache);
        parts += usize::from(
            snapshot(&cache).is_dir() && names(&snapshot(&cache)).iter().any(|name| name.ends_with(".part")),
        );
        // Some go on where others were killed, some begin anew.
        if snapshot(&cache).join(FILES[3]).exists() || round % 5 == 4 {
            hub.download("someone/tiny", &cache.0, |_| ()).unwrap();
            is_whole(&cache);
            assert_eq!(names(&snapshot(&cache)), &FILES[1..]);
            cache = Scratch::new();
        }
    }
    assert!(parts > 0, "no download died in the middle of {rounds}: the test did not test");
    drill::tried(rounds, &format!("kills while a model was downloaded ({parts} in the middle of a file)"));
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_an_error_and_leaves_no_bad_file() {
    let (hub, _) = serve(known());
    for blocks in [0, 1, 8] {
        let cache = Scratch::new();
        let status = downloading(&hub, &cache, &format!("trap '' XFSZ ; ulimit -f {blocks}")).status().unwrap();
        assert_eq!(status.code(), Some(7), "at most {blocks} blocks");
        is_whole(&cache);
        assert!(find_model("someone/tiny", Some(&cache.0)).is_err());
        hub.download("someone/tiny", &cache.0, |_| ()).unwrap();
        assert_eq!(names(&snapshot(&cache)), &FILES[1..]);
    }
}

#[cfg(unix)]
#[test]
fn links_in_place_of_parts_are_not_followed() {
    let cache = Scratch::new();
    let (folder, victim) = (snapshot(&cache), cache.0.join("victim"));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::create_dir_all(cache.0.join("models--someone--tiny").join("refs")).unwrap();
    std::fs::write(&victim, b"mine").unwrap();
    for part in [folder.join(format!(".{WEIGHTS}.part")), folder.join("../../refs/.main.part")] {
        std::os::unix::fs::symlink(&victim, part).unwrap();
    }
    serve(known()).0.download("someone/tiny", &cache.0, |_| ()).unwrap();
    assert_eq!(std::fs::read(&victim).unwrap(), b"mine");
    assert_eq!(std::fs::read(folder.join(WEIGHTS)).unwrap(), weights());
    assert!(!folder.join(WEIGHTS).is_symlink());
}
