//! Chromium without a driver: the DevTools protocol over a pair of pipes, with the standard library alone. A browser that does not start, does not
//! answer or refuses a call fails the test by a panic.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value, json};

/// Longer than any step takes on a slow machine; a page that hangs must not hang the test.
const PATIENCE: Duration = Duration::from_secs(25);

/// The browser on the search path, if there is one.
pub fn find() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];
    let folders: Vec<PathBuf> = std::env::split_paths(&std::env::var_os("PATH")?).collect();
    names.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name))).find(|path| path.is_file())
}

/// A window to open pages in.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// in pixels; below 600 it is a telephone's
    pub width: u32,
    /// in pixels
    pub height: u32,
    /// whether the page is asked for dark colours
    pub dark: bool,
}

/// A running browser with one tab, which ends with its value.
#[derive(Debug)]
pub struct Browser {
    process: Child,
    input: ChildStdin,
    messages: Receiver<Value>,
    session: Option<String>,
    last_id: u64,
    /// what the tab did that a page of ours must not do: exceptions, lines of the console and of the log, requests to a network
    pub complaints: Vec<String>,
    loaded: bool,
}

impl Browser {
    /// Starts a browser that keeps its profile in a folder, with an empty page.
    pub fn start(program: &Path, profile: &Path) -> Self {
        // The protocol uses descriptors 3 and 4; the shell puts our two pipes there.
        let mut process = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1"])
            .arg(program)
            .args(["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--no-first-run", "--disable-extensions", "--disable-background-networking", "--hide-scrollbars"])
            .arg(format!("--user-data-dir={}", profile.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the browser starts");
        let input = process.stdin.take().expect("a pipe to the browser");
        let output = process.stdout.take().expect("a pipe from the browser");
        let (sender, messages) = channel();
        std::thread::spawn(move || {
            let mut output = BufReader::new(output);
            let mut message = Vec::new();
            while output.read_until(0, &mut message).is_ok_and(|length| length > 0) {
                message.pop();
                if let Ok(value) = serde_json::from_slice(&message)
                    && sender.send(value).is_err()
                {
                    return;
                }
                message.clear();
            }
        });
        let mut browser =
            Self { process, input, messages, session: None, last_id: 0, complaints: Vec::new(), loaded: false };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"}));
        let attached = browser.call("Target.attachToTarget", json!({"targetId": target["targetId"], "flatten": true}));
        browser.session = attached["sessionId"].as_str().map(String::from);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Calls a method of the protocol and gives its result.
    pub fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.last_id += 1;
        let mut message = json!({"id": self.last_id, "method": method, "params": parameters});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        self.input.write_all(&bytes).expect("the browser reads");
        loop {
            let answer = self.receive();
            if answer["id"] == self.last_id {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].clone();
            }
        }
    }

    fn receive(&mut self) -> Value {
        let message = self.messages.recv_timeout(PATIENCE).expect("the browser answers in time");
        self.note(&message);
        message
    }

    fn note(&mut self, message: &Value) {
        let event = &message["params"];
        let complaint = match message["method"].as_str().unwrap_or_default() {
            "Page.loadEventFired" => {
                self.loaded = true;
                return;
            }
            "Runtime.exceptionThrown" => format!("exception: {}", event["exceptionDetails"]),
            "Runtime.consoleAPICalled" => format!("console: {} {}", event["type"], event["args"]),
            "Log.entryAdded" => format!("log: {}", event["entry"]),
            "Network.requestWillBeSent" => {
                let url = event["request"]["url"].as_str().unwrap_or_default();
                if url.starts_with("file:") || url.starts_with("data:") {
                    return;
                }
                format!("network: {url}")
            }
            _ => return,
        };
        self.complaints.push(complaint);
    }

    /// Opens a page and waits until it is loaded.
    pub fn open(&mut self, page: &Path, window: Window) {
        let (width, height) = (window.width, window.height);
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600});
        self.call("Emulation.setDeviceMetricsOverride", metrics);
        let scheme = if window.dark { "dark" } else { "light" };
        let feature = json!({"name": "prefers-color-scheme", "value": scheme});
        self.call("Emulation.setEmulatedMedia", json!({"media": "", "features": [feature]}));
        self.loaded = false;
        self.call("Page.navigate", json!({"url": format!("file://{}", page.display())}));
        while !self.loaded {
            self.receive();
        }
    }

    /// Evaluates a script in the page. A promise is waited for; an exception fails the test.
    pub fn evaluate(&mut self, script: &str) -> Value {
        let parameters = json!({"expression": script, "awaitPromise": true, "returnByValue": true});
        let answer = self.call("Runtime.evaluate", parameters);
        let exception = &answer["exceptionDetails"];
        assert!(exception.is_null(), "{}", exception["exception"]["description"].as_str().unwrap_or("exception"));
        answer["result"]["value"].clone()
    }

    /// Turns the wheel over a point.
    pub fn wheel(&mut self, x: f64, y: f64, delta: f64) {
        let event = json!({"type": "mouseWheel", "x": x, "y": y, "deltaX": 0, "deltaY": delta});
        self.call("Input.dispatchMouseEvent", event);
    }

    /// Presses, moves and releases the mouse.
    pub fn drag(&mut self, from: (f64, f64), to: (f64, f64)) {
        for (kind, (x, y)) in [("mousePressed", from), ("mouseMoved", to), ("mouseReleased", to)] {
            let event = json!({"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1});
            self.call("Input.dispatchMouseEvent", event);
        }
    }

    /// Spreads two fingers about a point.
    pub fn pinch(&mut self, x: f64, y: f64) {
        self.call("Emulation.setTouchEmulationEnabled", json!({"enabled": true, "maxTouchPoints": 2}));
        let fingers = |apart: f64| json!([{"x": x - apart, "y": y, "id": 0}, {"x": x + apart, "y": y, "id": 1}]);
        for (kind, points) in [("touchStart", fingers(30.0)), ("touchMove", fingers(60.0)), ("touchEnd", json!([]))] {
            self.call("Input.dispatchTouchEvent", json!({"type": kind, "touchPoints": points}));
        }
        self.call("Emulation.setTouchEmulationEnabled", json!({"enabled": false}));
    }

    /// Moves the mouse.
    pub fn point(&mut self, x: f64, y: f64) {
        self.call("Input.dispatchMouseEvent", json!({"type": "mouseMoved", "x": x, "y": y}));
    }

    /// Presses a key.
    pub fn key(&mut self, key: &str) {
        let text = if key.len() == 1 { key } else { "" };
        self.call("Input.dispatchKeyEvent", json!({"type": "keyDown", "key": key, "text": text}));
        self.call("Input.dispatchKeyEvent", json!({"type": "keyUp", "key": key}));
    }

    /// The whole page as pictures (PNG), each as high as a screen.
    pub fn pictures(&mut self) -> Vec<Vec<u8>> {
        const SCREEN: f64 = 1200.0;
        let size = self.call("Page.getLayoutMetrics", json!({}))["cssContentSize"].clone();
        let (width, height) = (size["width"].as_f64().unwrap_or(0.0), size["height"].as_f64().unwrap_or(0.0));
        let screens = (height / SCREEN).ceil() as usize;
        (0..screens)
            .map(|screen| {
                let top = screen as f64 * SCREEN;
                let clip = json!({"x": 0, "y": top, "width": width, "height": SCREEN.min(height - top), "scale": 1});
                let parameters = json!({"format": "png", "captureBeyondViewport": true, "clip": clip});
                let answer = self.call("Page.captureScreenshot", parameters);
                decode_base64(answer["data"].as_str().unwrap_or_default())
            })
            .collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn decode_base64(text: &str) -> Vec<u8> {
    let value = |letter: u8| match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let mut bytes = Vec::new();
    for chunk in text.trim_end_matches('=').as_bytes().chunks(4) {
        let word =
            chunk.iter().fold(0_u32, |word, &letter| word << 6 | u32::from(value(letter))) << (6 * (4 - chunk.len()));
        bytes.extend_from_slice(&word.to_be_bytes()[1..chunk.len()]);
    }
    bytes
}
