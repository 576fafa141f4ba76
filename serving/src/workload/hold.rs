//! Holds conversations against a cluster and writes down what their clients saw.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use indicatif::ProgressBar;
use serde_json::{Value, json};
use thiserror::Error;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

use super::report::{Mode, Pinned};
use crate::client::{Answer, Ask, Client, ClientError, metric};
use crate::cluster::Cluster;

/// How often the pinned blocks are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Why a load could not be held.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HoldError {
    /// A client could not be made, or a node does not answer.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A conversation's task ended without a result.
    #[error("a conversation was abandoned: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// One turn to be held.
#[derive(Debug, Clone)]
pub struct TalkTurn {
    /// Time between the answer before it and this question.
    pub gap: Duration,
    /// The question.
    pub question: String,
    /// Tokens of the answer, exactly.
    pub answer_tokens: u64,
}

/// One conversation to be held.
#[derive(Debug, Clone)]
pub struct Talk {
    /// Which group it belongs to in reports; without one, each turn belongs to those of its prompt's length.
    pub group: Option<String>,
    /// When it begins.
    pub begin: Duration,
    /// Its turns.
    pub turns: Vec<TalkTurn>,
}

/// What is to be held.
#[derive(Debug, Clone)]
pub struct Load {
    /// The conversations.
    pub talks: Vec<Talk>,
    /// How many turns may be under way at once, over all conversations.
    pub clients: usize,
    /// Clear the prefill nodes' own prefix caches after each turn.
    pub clear_prefix_cache: bool,
}

/// One turn that was held.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Its conversation's number in the load.
    pub talk: usize,
    /// Its conversation's group.
    pub group: Option<String>,
    /// Its number in the conversation, from 0.
    pub turn: usize,
    /// The answer, or why there is none.
    pub answer: Result<Answer, String>,
}

impl Sample {
    /// A number of the report that came with the answer; 0 where there is none.
    #[must_use]
    pub fn count(&self, pointer: &str) -> u64 {
        let answer = self.answer.as_ref().ok();
        answer
            .and_then(|answer| answer.report.pointer(pointer)?.as_u64())
            .unwrap_or(0)
    }

    /// Whether the router knew where the conversation's blocks are.
    #[must_use]
    pub fn hit(&self) -> bool {
        let answer = self.answer.as_ref().ok();
        answer
            .and_then(|answer| answer.report.pointer("/router/hit")?.as_bool())
            .unwrap_or(false)
    }
}

/// Holds a load. Samples are in no particular order; the second list says over time how many blocks the
/// decode nodes kept for next turns.
pub(super) async fn hold(
    load: &Load,
    mode: Mode,
    cluster: &Cluster,
    key: &str,
    bar: &ProgressBar,
) -> Result<(Vec<Sample>, Vec<Pinned>), HoldError> {
    let client = Client::new(&cluster.router.url(), key)?;
    let prefill: Arc<Vec<String>> =
        Arc::new(cluster.prefill.iter().map(|node| node.url()).collect());
    let decode: Vec<String> = cluster.decode.iter().map(|node| node.url()).collect();
    let begin = Instant::now();
    let places = Arc::new(Semaphore::new(load.clients.max(1)));
    let done = Arc::new(AtomicUsize::new(0));
    let mut talks = JoinSet::new();
    for (number, talk) in load.talks.iter().cloned().enumerate() {
        let (client, places, done) = (client.clone(), Arc::clone(&places), Arc::clone(&done));
        let (prefill, clear, bar) = (Arc::clone(&prefill), load.clear_prefix_cache, bar.clone());
        talks.spawn(async move {
            sleep_until(begin + talk.begin).await;
            let one = Conversation {
                number,
                name: format!("load-{number}"),
                client,
                prefill: if clear { prefill } else { Arc::default() },
            };
            let samples = one.hold(&talk, &places, &bar).await;
            done.fetch_add(1, Ordering::Relaxed);
            samples
        });
    }
    let mut samples = Vec::new();
    let mut pinned = Vec::new();
    loop {
        tokio::select! {
            talk = talks.join_next() => match talk {
                Some(talk) => samples.extend(talk??),
                None => break,
            },
            () = sleep(LOOK_EVERY) => {
                let mut blocks = 0.0;
                for node in &decode {
                    let text = client.metrics(node).await?;
                    blocks += metric(&text, "kvx_pool_blocks", "state=\"leased\"");
                }
                pinned.push(Pinned {
                    mode,
                    seconds: begin.elapsed().as_secs_f64(),
                    blocks: blocks as u64,
                });
            }
        }
    }
    Ok((samples, pinned))
}

struct Conversation {
    number: usize,
    name: String,
    client: Client,
    prefill: Arc<Vec<String>>,
}

impl Conversation {
    async fn hold(
        &self,
        talk: &Talk,
        places: &Semaphore,
        bar: &ProgressBar,
    ) -> Result<Vec<Sample>, ClientError> {
        let mut messages: Vec<Value> = Vec::new();
        let mut samples = Vec::new();
        for (number, turn) in talk.turns.iter().enumerate() {
            sleep(turn.gap).await;
            // Closed only when everything is over.
            let Ok(_place) = places.acquire().await else {
                break;
            };
            messages.push(json!({"role": "user", "content": turn.question}));
            let ask = Ask {
                conversation: Some(&self.name),
                messages: &messages,
                max_tokens: turn.answer_tokens,
                ignore_eos: true,
            };
            let answer = self.client.chat(ask, |_| {}).await;
            bar.inc(1);
            let failed = answer.is_err();
            if let Ok(answer) = &answer {
                messages.push(json!({"role": "assistant", "content": answer.text}));
            }
            samples.push(Sample {
                talk: self.number,
                group: talk.group.clone(),
                turn: number,
                answer: answer.map_err(|error| error.to_string()),
            });
            if failed {
                break;
            }
            for node in self.prefill.iter() {
                self.client.reset_prefix_cache(node).await?;
            }
        }
        Ok(samples)
    }
}
