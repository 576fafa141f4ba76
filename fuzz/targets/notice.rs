#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| kvx_fuzz::library::notice(data));
