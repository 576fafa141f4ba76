//! The decoders of the tool.

use kvx::bench::proto::{Answer, Request};
use kvx::demo::trace;

/// A target: its name, which is that of its corpus, and what it does with bytes.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: &[Target] = &[("trace", trace), ("bench_line", bench_line)];

/// A trace of requests.
pub fn trace(data: &[u8]) {
    if let Ok(conversations) = trace::read_conversations(data) {
        let _ = trace::select(&conversations, 100_000, 100);
    }
}

/// A line of a bench's processes or of its holder on another node.
pub fn bench_line(data: &[u8]) {
    if let Ok(request) = serde_json::from_slice::<Request>(data) {
        let text = serde_json::to_vec(&request).expect("it was understood");
        assert!(serde_json::from_slice::<Request>(&text).is_ok());
        if let Request::Setup { shape, .. } = request {
            let _ = shape.bytes();
        }
    }
    if let Ok(answer) = serde_json::from_slice::<Answer>(data) {
        assert!(serde_json::to_vec(&answer).is_ok());
    }
}
