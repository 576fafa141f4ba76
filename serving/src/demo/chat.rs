//! A conversation with a person, who sees after each answer what was read and what was computed.

use std::io::{self, BufRead, Write};
use std::thread;

use kvx::cli::Exit;
use serde_json::{Value, json};

use super::DemoArgs;
use super::play::{DemoError, fail, progress, until_interrupted};
use crate::client::{Answer, Ask, Client};
use crate::cluster::{Cluster, ClusterSpec, this_program};
use crate::provision;

const WELCOME: &str = "A model of 135 million parameters, on three processes of this machine: router, prefill, decode.\n\
The prefill node forgets everything after each turn; watch how little it computes.\n\
/plain switches the transfer off for the next turns, /quit ends.\n";

pub(super) fn run(args: &DemoArgs) -> Exit {
    match until_interrupted(chat(args)) {
        Ok(()) => Exit::Ok,
        Err(DemoError::Interrupted) => Exit::Ok,
        Err(error) => fail(&error),
    }
}

async fn chat(args: &DemoArgs) -> Result<(), DemoError> {
    provision::model()?;
    let bar = progress(1, false);
    bar.set_message("starting router, prefill and decode");
    let cluster = Cluster::start(&ClusterSpec {
        program: this_program()?,
        prefill: 1,
        decode: 1,
        bidirectional: true,
        kv_cache_mib: args.kv_cache_mib,
        node_arguments: Vec::new(),
        router_arguments: Vec::new(),
    })?;
    bar.finish_and_clear();
    let client = Client::new(&cluster.router.url(), "chat")?;
    println!("{WELCOME}");
    let (sender, mut lines) = tokio::sync::mpsc::channel(1);
    // Reading a terminal cannot be interrupted: the thread ends with the process.
    thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    let mut messages: Vec<Value> = Vec::new();
    let mut plain = false;
    loop {
        print!("you> ");
        let _ = io::stdout().flush();
        let Some(line) = lines.recv().await else {
            println!();
            return Ok(());
        };
        match line.trim() {
            "" => continue,
            "/quit" => return Ok(()),
            "/plain" => {
                plain = !plain;
                println!("[transfer {}]", if plain { "off" } else { "on" });
                continue;
            }
            _ => messages.push(json!({"role": "user", "content": line.trim()})),
        }
        // A conversation that nobody has seen before has no blocks anywhere.
        let fresh = format!("plain-{}", messages.len());
        let ask = Ask {
            conversation: Some(if plain { &fresh } else { "chat" }),
            messages: &messages,
            max_tokens: 256,
            ignore_eos: false,
        };
        let answer = client.chat(ask, |text| {
            print!("{text}");
            let _ = io::stdout().flush();
        });
        match answer.await {
            Ok(answer) => {
                println!("\n{}", summary(&answer));
                messages.push(json!({"role": "assistant", "content": answer.text}));
            }
            Err(error) => {
                println!("\n[{error}]");
                messages.pop();
            }
        }
        for node in &cluster.prefill {
            client.reset_prefix_cache(&node.url()).await?;
        }
    }
}

fn summary(answer: &Answer) -> String {
    let count = |name: &str| {
        answer
            .report
            .pointer(name)
            .and_then(Value::as_u64)
            .unwrap_or(0)
    };
    let transfer = answer
        .report
        .pointer("/prefill/transfer_ms")
        .and_then(Value::as_f64)
        .unwrap_or(0.0);
    format!(
        "[{} tokens of prompt: {} read from decode in {transfer:.1} ms, {} computed; first token after {:.0} ms]",
        answer.prompt_tokens,
        count("/prefill/read_tokens"),
        count("/prefill/computed_tokens"),
        answer.ttft.as_secs_f64() * 1e3,
    )
}
