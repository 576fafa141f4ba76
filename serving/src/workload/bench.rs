//! `serving bench`: time to first token by context length, with and without the transfer.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kvx::cli::Exit;

use super::hold::{Load, Talk, TalkTurn};
use super::replay::measure;
use super::text::Filler;
use crate::model::Loaded;

/// Help after the arguments.
pub const BENCH_HELP: &str = "\
Examples:
  serving bench                                       contexts of 512 to 7k tokens, three turns each
  serving bench --contexts 512 --conversations 10 --turns 10 --input 150 --output 300 --clients 2
                                                      ten conversations that grow by 450 tokens a turn
  serving bench --contexts 2k --conversations 20 --rate 0.5 --out results
                                                      one begins every two seconds; plots into results/

Exit status: 0 all is well; 1 a turn had no answer, or another one off than on, or blocks leaked; 2 usage;
3 something is missing on this machine; 130 interrupted";

/// Arguments of `serving bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// Tokens of the first question of each group of conversations; k stands for 1024
    #[arg(long, value_name = "TOKENS,…", value_delimiter = ',', value_parser = tokens,
          default_values = ["512", "1k", "2k", "4k", "7k"])]
    pub contexts: Vec<usize>,

    /// Conversations in each group
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub conversations: u32,

    /// Turns of each conversation
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub turns: u32,

    /// Tokens of each further question
    #[arg(long, value_name = "TOKENS", default_value_t = 150, value_parser = clap::value_parser!(u32).range(1..=8000))]
    pub input: u32,

    /// Tokens of each answer
    #[arg(long, value_name = "TOKENS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=4000))]
    pub output: u64,

    /// Conversations that begin each second; without it all begin at once
    #[arg(long, value_name = "R", value_parser = rate)]
    pub rate: Option<f64>,

    /// Turns under way at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub clients: u32,

    /// Let prefill nodes keep their own prefix caches between turns
    #[arg(long)]
    pub keep_prefix_cache: bool,

    /// What bench and replay have in common
    #[command(flatten)]
    pub common: LoadArgs,
}

/// What bench and replay have in common.
#[derive(Debug, Clone, Args)]
pub struct LoadArgs {
    /// Prefill nodes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub prefill_nodes: u32,

    /// Decode nodes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub decode_nodes: u32,

    /// Memory of each node's KV pool, MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(32..=65536))]
    pub kv_cache_mib: u64,

    /// Print one JSON object to stdout, and nothing else
    #[arg(long)]
    pub json: bool,

    /// Write plots and the JSON object into this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Seed of the texts
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// A number of tokens such as `512` or `4k`.
fn tokens(text: &str) -> Result<usize, String> {
    let (number, unit) = match text.strip_suffix(['k', 'K']) {
        Some(number) => (number, 1024),
        None => (text, 1),
    };
    number
        .parse::<usize>()
        .ok()
        .and_then(|number| number.checked_mul(unit))
        .filter(|tokens| (1..=1 << 20).contains(tokens))
        .ok_or_else(|| format!("{text} is no number of tokens such as 512 or 4k"))
}

/// A rate above zero.
fn rate(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|rate: &f64| rate.is_finite() && *rate > 0.0)
        .ok_or_else(|| format!("{text} is no number of conversations a second above 0"))
}

/// Runs the bench.
#[must_use]
pub fn run(args: &BenchArgs) -> Exit {
    measure("bench", &args.common, |model| load(args, model))
}

fn load(args: &BenchArgs, model: &Loaded) -> Load {
    let filler = Filler::new(&model.tokenizer);
    let mut talks = Vec::new();
    for context in &args.contexts {
        for _ in 0..args.conversations {
            let number = talks.len() as u64;
            let begin = match args.rate {
                // Longer than a day is not meant.
                Some(rate) => Duration::from_secs_f64((number as f64 / rate).min(86_400.0)),
                None => Duration::ZERO,
            };
            let turns = (0..args.turns)
                .map(|turn| TalkTurn {
                    gap: Duration::ZERO,
                    question: filler.text(
                        args.common.seed ^ (number << 20) ^ u64::from(turn),
                        if turn == 0 {
                            *context
                        } else {
                            args.input as usize
                        },
                    ),
                    answer_tokens: args.output,
                })
                .collect();
            talks.push(Talk {
                group: Some(context.to_string()),
                begin,
                turns,
            });
        }
    }
    Load {
        talks,
        clients: args.clients as usize,
        clear_prefix_cache: !args.keep_prefix_cache,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_read() {
        assert_eq!(tokens("512"), Ok(512));
        assert_eq!(tokens("7k"), Ok(7168));
        for bad in ["", "k", "0", "-1", "1.5k", "99999999999999999999k"] {
            assert!(tokens(bad).is_err(), "{bad}");
        }
    }
}
