//! Clients that others wrote work as they are: OpenAI's Python package, and curl.
//!
//! The Python package is installed into a folder of the build directory. Where that is not possible the
//! test says `skipped: reason`; with `KV_XFER_REQUIRE_OPENAI=1` it fails instead.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use support::*;

const PACKAGE: &str = "openai==3.57.0";

const SCRIPT: &str = r#"
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="k", max_retries=0, timeout=60)
messages = [{"role": "user", "content": "hello"}]
for turn in range(3):
    if turn % 2:
        answer = client.chat.completions.create(model="m", messages=messages)
        assert answer.usage.total_tokens == 7, answer
        text = answer.choices[0].message.content
    else:
        text = ""
        for chunk in client.chat.completions.create(model="m", messages=messages, stream=True):
            assert not hasattr(chunk, "kv_transfer_params"), chunk
            text += chunk.choices[0].delta.content
    assert text == f"answer {turn} of d", text
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
named = client.chat.completions.create(model="m", messages=messages, extra_body={"conversation_id": "c"})
text = "".join(c.choices[0].text for c in client.completions.create(model="m", prompt="once", stream=True))
assert text == "answer 4 of d", text
assert client.models.list().data[0].id == "p"
try:
    client.chat.completions.create(model="m", messages=messages, extra_body={"conversation_id": ""})
    raise SystemExit("an empty id was taken")
except openai.BadRequestError as error:
    assert "must not be empty" in error.message and error.param == "conversation_id", error
try:
    for chunk in client.chat.completions.create(model="m", messages=messages, stream=True, extra_body={"conversation_id": "cut"}):
        pass
    raise SystemExit("a stream that broke off looked whole")
except openai.APIError as error:
    assert "went away" in error.message, error
print("done")
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

async fn run(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().unwrap())
        .await
        .unwrap()
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn openais_package_talks_to_it() {
    let packages = match tokio::task::spawn_blocking(packages).await.unwrap() {
        Ok(packages) => packages,
        Err(reason) => {
            assert!(
                std::env::var_os("KV_XFER_REQUIRE_OPENAI").is_none(),
                "{reason}"
            );
            let _ = writeln!(std::io::stderr(), "skipped: {reason}");
            return;
        }
    };
    let (p, d) = (Node::start("p"), Node::start("d"));
    let client = Client::start(config(&[&p], &[&d])).await;
    let mut command = Command::new("python3");
    command
        .env("PYTHONPATH", packages)
        .env_remove("HTTP_PROXY")
        .env_remove("http_proxy")
        .env("NO_PROXY", "127.0.0.1")
        .args(["-c", SCRIPT, &client.url("")]);
    for _ in 0..5 {
        d.next(Reply::Usual);
    }
    d.next_stream(vec![send("data: {\"id\":\"a\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"m\",\"choices\":[]}\n\n"), Step::Break]);
    let output = run(command).await;
    assert!(
        output.status.success() && text(&output).contains("done"),
        "{}",
        text(&output)
    );
    assert_eq!(
        client.hits().await,
        2,
        "turns without an id were recognised"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn curl_talks_to_it() {
    if Command::new("curl").arg("--version").output().is_err() {
        let _ = writeln!(std::io::stderr(), "skipped: there is no curl");
        return;
    }
    let (p, d) = (Node::start("p"), Node::start("d"));
    let client = Client::start(config(&[&p], &[&d])).await;
    for stream in [true, false] {
        let mut command = Command::new("curl");
        command.args([
            "--silent",
            "--show-error",
            "--no-buffer",
            "--noproxy",
            "*",
            "--fail",
            "--max-time",
            "60",
        ]);
        command.args([
            "-H",
            "Content-Type: application/json",
            "-H",
            "X-Conversation-ID: c",
            "-d",
        ]);
        command.arg(format!(
            "{{\"model\":\"m\",\"stream\":{stream},\"messages\":[]}}"
        ));
        command.arg(client.url("/v1/chat/completions"));
        let output = run(command).await;
        assert!(output.status.success(), "{}", text(&output));
        let got = String::from_utf8(output.stdout).unwrap();
        assert!(
            got.contains("answer") || got.ends_with("[DONE]\n\n"),
            "{got}"
        );
    }
    assert_eq!(client.hits().await, 1);
}
