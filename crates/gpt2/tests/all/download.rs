//! Downloads from a Hub that is a thread of this test.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};

use crate::support::{Scratch, fixture};
use deuteron_gpt2::{Checkpoint, DownloadError, Hub, find_model};

const REVISION: &str = "607a30d783dfa663caf39e06633721c8d4cfcd7e";

/// A server of files by path, which writes down what it was asked for. It ends with the process.
fn serve(files: HashMap<String, Vec<u8>>) -> (Hub, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = asked.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let lines: Vec<String> = lines.map(Result::unwrap).take_while(|line| !line.is_empty()).collect();
            let path = lines[0].split(' ').nth(1).unwrap().to_string();
            let allowed = lines.iter().any(|line| line.eq_ignore_ascii_case("authorization: bearer let \"me\" in"));
            log.lock().unwrap().push(format!("{path}{}", if allowed { " with token" } else { "" }));
            let (status, body) = match files.get(&path) {
                Some(body) => ("200 OK", body.as_slice()),
                None => ("404 Not Found", &b"no"[..]),
            };
            let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            // A client that is satisfied early is none of our concern.
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        }
    });
    (Hub { endpoint, token: None }, asked)
}

/// A repository as the Hub describes it, with the files of a fixture.
fn repository(name: &str, revision: &str, listed: &[&str]) -> HashMap<String, Vec<u8>> {
    let siblings: Vec<String> = listed.iter().map(|file| format!(r#"{{"rfilename":"{file}"}}"#)).collect();
    let answer = format!(r#"{{"sha":"{revision}","siblings":[{}]}}"#, siblings.join(","));
    let mut files = HashMap::from([(format!("/api/models/{name}/revision/main"), answer.into_bytes())]);
    for file in listed {
        if let Ok(bytes) = std::fs::read(fixture("gelu").join(file)) {
            files.insert(format!("/{name}/resolve/{revision}/{file}"), bytes);
        }
    }
    files
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
    let fails = |files: HashMap<String, Vec<u8>>, words: &str| {
        let error = serve(files).0.download("someone/tiny", &cache.0, |_| ()).unwrap_err().to_string();
        assert!(error.contains(words), "`{words}` is missing in {error}");
    };
    fails(HashMap::new(), "404");
    fails(HashMap::from([("/api/models/someone/tiny/revision/main".into(), b"<html>".to_vec())]), "not understood");
    fails(repository("someone/tiny", "../../x", &FILES), "no revision");
    fails(repository("someone/tiny", REVISION, &["config.json", "pytorch_model.bin"]), "no model.safetensors");
    let hub = Hub { endpoint: "http://127.0.0.1:9".into(), token: None };
    assert!(matches!(hub.download("../x", &cache.0, |_| ()), Err(DownloadError::Name(_))));
    assert!(matches!(hub.download("gpt2", &cache.0, |_| ()), Err(DownloadError::Fetch { .. })));
    assert!(!cache.0.join("models--someone--tiny").exists());
}
