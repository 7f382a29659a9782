#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    deuteron_testkit::fuzz::text_graph(data);
});
