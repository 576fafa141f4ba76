//! Clients that others wrote hold a conversation over router, prefill and decode nodes: OpenAI's Python
//! package, installed into a folder of the build directory, and curl.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serving::cluster::{Cluster, ClusterSpec};
use serving::provision;

const PACKAGE: &str = "openai==3.57.0";

const SCRIPT: &str = r#"
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="k", max_retries=0, timeout=120)
model = client.models.list().data[0].id
messages = [{"role": "system", "content": "Answer in a few words."}]
for turn in range(3):
    messages.append({"role": "user", "content": f"Question {turn}: what is a river? " + "Say it well. " * 30})
    ask = dict(model=model, messages=messages, max_tokens=12, temperature=0)
    if turn == 1:
        answer = client.chat.completions.create(**ask)
        assert answer.usage.prompt_tokens_details.cached_tokens > 0, answer.usage
        assert not getattr(answer, "kv_transfer_params", None), answer
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    else:
        text = ""
        for chunk in client.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **ask
        ):
            assert not getattr(chunk, "kv_transfer_params", None), chunk
            if chunk.usage and turn == 0:
                # Blocks that decode reads from prefill were computed for this very request.
                assert chunk.usage.prompt_tokens_details.cached_tokens == 0, chunk.usage
                counted = True
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason
    assert text and reason in ("stop", "length"), (text, reason)
    messages.append({"role": "assistant", "content": text})
assert counted
try:
    client.chat.completions.create(model=model, messages=messages, max_tokens=-1)
    raise SystemExit("a negative length was taken")
except openai.BadRequestError:
    pass
print("done", len(messages))
"#;

fn packages() -> Result<PathBuf, String> {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("openai");
    let works = || {
        let found = Command::new("python3")
            .env("PYTHONPATH", &target)
            .args(["-c", "import openai"])
            .output();
        found.is_ok_and(|output| output.status.success())
    };
    if works() {
        return Ok(target);
    }
    let output = Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--upgrade", "--target"])
        .arg(&target)
        .arg(PACKAGE)
        .output()
        .map_err(|error| format!("python3 cannot be run: {error}"))?;
    match works() {
        true => Ok(target),
        false => Err(format!(
            "{PACKAGE} cannot be installed: {}",
            String::from_utf8_lossy(&output.stderr)
        )),
    }
}

fn cluster() -> Cluster {
    Cluster::start(&ClusterSpec {
        program: PathBuf::from(env!("CARGO_BIN_EXE_serving")),
        prefill: 1,
        decode: 1,
        bidirectional: true,
        kv_cache_mib: 96,
        node_arguments: Vec::new(),
        router_arguments: Vec::new(),
    })
    .unwrap()
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

#[test]
fn openais_package_and_curl_hold_a_conversation() {
    if let Err(error) = provision::model() {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: openais_package_and_curl_hold_a_conversation: {error}"
        );
        return;
    }
    let cluster = cluster();
    match packages() {
        Err(reason) => {
            assert!(
                std::env::var_os("KV_XFER_REQUIRE_OPENAI").is_none(),
                "{reason}"
            );
            let _ = writeln!(std::io::stderr(), "skipped: OpenAI's package: {reason}");
        }
        Ok(packages) => {
            let output = Command::new("python3")
                .env("PYTHONPATH", packages)
                .env("NO_PROXY", "127.0.0.1")
                .args(["-c", SCRIPT, &cluster.router.url()])
                .output()
                .unwrap();
            let text = text(&output);
            assert!(output.status.success() && text.contains("done 7"), "{text}");
        }
    }
    if Command::new("curl").arg("--version").output().is_err() {
        let _ = writeln!(std::io::stderr(), "skipped: there is no curl");
        return;
    }
    for stream in [true, false] {
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--no-buffer", "--noproxy", "*", "--fail"])
            .args(["--max-time", "120", "-H", "Content-Type: application/json"])
            .args(["-H", "X-Conversation-ID: curl", "-d"])
            .arg(format!(
                "{{\"stream\":{stream},\"max_tokens\":4,\"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}"
            ))
            .arg(format!("{}/v1/chat/completions", cluster.router.url()))
            .output()
            .unwrap();
        let text = text(&output);
        assert!(output.status.success(), "{text}");
        assert!(!text.contains("kv_transfer_params\":{"), "{text}");
        assert_eq!(stream, text.ends_with("data: [DONE]\n\n"), "{text}");
        assert!(text.contains("\"finish_reason\":\"length\""), "{text}");
    }
}
