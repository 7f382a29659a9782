#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| drop(deuteron_testkit::fuzz::onnx(data)));
