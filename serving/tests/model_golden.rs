//! The model against an independent implementation (`golden/reference.py`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "common/model.rs"]
mod common;

use serde::Deserialize;
use serving::model::{Chunk, Sampler, SamplingParams};

#[derive(Deserialize)]
struct Golden {
    runs: Vec<Run>,
    texts: Vec<Text>,
}

#[derive(Deserialize)]
struct Run {
    prompt: String,
    tokens: Vec<u32>,
    /// Id and logit of the likeliest tokens.
    top: Vec<(u32, f32)>,
    answer: Vec<u32>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    marked: Vec<u32>,
    plain: Vec<u32>,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("golden/golden.json")).unwrap()
}

#[test]
fn logits_and_greedy_tokens_are_those_of_the_reference() {
    let Some(loaded) = common::loaded() else {
        return;
    };
    let model = &loaded.model;
    let pool = common::pool(model, 16, 8);
    let blocks = common::blocks(0..8);
    for run in golden().runs {
        assert_eq!(loaded.tokenizer.encode(&run.prompt).unwrap(), run.tokens);
        let mut sampler = Sampler::new(&SamplingParams::greedy());
        let mut tokens = run.tokens.clone();
        let mut start = 0;
        let mut answer = Vec::new();
        for step in 0..run.answer.len() {
            let chunk = Chunk {
                tokens: &tokens[start..],
                start,
                blocks: &blocks,
                logits: true,
            };
            let logits = model.forward(&pool, &[chunk]).unwrap().remove(0).unwrap();
            if step == 0 {
                let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
                ids.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
                let expected: Vec<u32> = run.top.iter().map(|(id, _)| *id).collect();
                assert_eq!(ids[..5], expected, "{}", run.prompt);
                for (id, expected) in &run.top {
                    let found = logits[*id as usize];
                    assert!((found - expected).abs() < 0.02, "{id}: {found}, {expected}");
                }
            }
            start = tokens.len();
            let token = sampler.sample(&logits);
            tokens.push(token);
            answer.push(token);
        }
        assert_eq!(answer, run.answer, "{}", run.prompt);
    }
}

#[test]
fn texts_are_encoded_as_by_the_reference() {
    let Some(loaded) = common::loaded() else {
        return;
    };
    let tokenizer = &loaded.tokenizer;
    for text in golden().texts {
        let (found, plain) = (
            tokenizer.encode(&text.text).unwrap(),
            tokenizer.encode_plain(&text.text).unwrap(),
        );
        assert_eq!(found, text.marked, "{:?}", text.text);
        assert_eq!(plain, text.plain, "{:?}", text.text);
        assert_eq!(tokenizer.decode(&plain), text.text);
        let mut stream = tokenizer.stream();
        let mut shown: String = plain
            .iter()
            .filter_map(|token| stream.push(*token))
            .collect();
        shown.extend(stream.finish());
        assert_eq!(shown, text.text);
    }
}
