"""Writes golden.json: what an independent reading of the model says.

A plain float64 llama in numpy over the weights that the `gguf` package dequantises, and a plain
byte-level BPE written down from its definition. Needs numpy and gguf (`pip install numpy gguf regex`).

    python3 reference.py MODEL.gguf > golden.json
"""

import json
import sys

import gguf
import numpy as np
import regex

file = gguf.GGUFReader(sys.argv[1])


def field(key):
    return file.fields[key].contents()


def tensors():
    for tensor in file.tensors:
        yield tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type)


WEIGHTS = {name: np.asarray(value, dtype=np.float64) for name, value in tensors()}
LAYERS = field("llama.block_count")
HEADS = field("llama.attention.head_count")
KV_HEADS = field("llama.attention.head_count_kv")
DIM = field("llama.rope.dimension_count")
BASE = field("llama.rope.freq_base")
EPS = field("llama.attention.layer_norm_rms_epsilon")
NAMES = field("tokenizer.ggml.tokens")
IDS = {name: i for i, name in enumerate(NAMES)}
SPECIAL = {NAMES[i] for i, kind in enumerate(field("tokenizer.ggml.token_type")) if kind == 3}
RANKS = {tuple(merge.split(" ")): rank for rank, merge in enumerate(field("tokenizer.ggml.merges"))}


def norm(x, weight):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + EPS) * weight


def rope(x):
    """Rotates neighbours, as llama.cpp does for llama models; x is [tokens, heads, DIM]."""
    angles = np.arange(len(x))[:, None] * BASE ** (-2 * np.arange(DIM // 2) / DIM)
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2], out[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
    return out


def half(x):
    """The cache holds f16."""
    return x.astype(np.float16).astype(np.float64)


def logits(tokens):
    count = len(tokens)
    x = WEIGHTS["token_embd.weight"][tokens]
    hidden = np.triu(np.full((count, count), -np.inf), 1)
    for layer in range(LAYERS):
        weight = lambda name: WEIGHTS[f"blk.{layer}.{name}.weight"]
        h = norm(x, weight("attn_norm"))
        q = rope((h @ weight("attn_q").T).reshape(count, HEADS, DIM))
        k = half(rope((h @ weight("attn_k").T).reshape(count, KV_HEADS, DIM)))
        v = half((h @ weight("attn_v").T).reshape(count, KV_HEADS, DIM))
        k, v = (np.repeat(t, HEADS // KV_HEADS, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM) + hidden
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", scores, v).reshape(count, HEADS * DIM)
        x = x + attended @ weight("attn_output").T
        h = norm(x, weight("ffn_norm"))
        gate, up = h @ weight("ffn_gate").T, h @ weight("ffn_up").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight("ffn_down").T
    return norm(x[-1], WEIGHTS["output_norm.weight"]) @ WEIGHTS["token_embd.weight"].T


def alphabet():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in chars:
            chars[byte] = chr(256 + len(chars) - len(printable))
    return chars


BYTES = alphabet()
GPT2 = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
DIGIT = regex.compile(r"(\p{N})")


def word(text):
    parts = [BYTES[byte] for byte in text.encode()]
    while len(parts) > 1:
        rank, at = min((RANKS.get(pair, 1 << 30), i) for i, pair in enumerate(zip(parts, parts[1:])))
        if rank == 1 << 30:
            break
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    return [IDS[part] for part in parts]


def plain(text):
    pieces = [piece for piece in DIGIT.split(text) if piece]
    return [i for piece in pieces for found in GPT2.findall(piece) for i in word(found)]


MARKED = regex.compile("(" + "|".join(map(regex.escape, sorted(SPECIAL))) + ")")


def encode(text):
    pieces = [piece for piece in MARKED.split(text) if piece]
    return [i for p in pieces for i in ([IDS[p]] if p in SPECIAL else plain(p))]


SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def chat(question):
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


PROMPTS = [
    "The capital of France is",
    chat("What is the capital of Italy?"),
    chat("Count from 1 to 10."),
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
]
TEXTS = [
    "",
    " ",
    "\n",
    "Hello, world!",
    "  leading and trailing  ",
    "a\n\n\nb\t\tc\r\nd",
    "\n\n  x",
    "In 2024, 1234567 people paid $99.95 (3.14159) at 10:45.",
    "don't we'll I'm they've he'd it's you're DON'T",
    "naïve café — “quoted” … ¿qué?",
    "日本語のテキストと中文字符 한국어",
    "emoji 👩‍👩‍👧‍👦 🇫🇷 👍🏽 end",
    "Ⅷ ½ ² ٣٤ ७",
    "def f(x):\n\treturn {'a': [1, 2, x**2]}  # comment\n\n\nclass A:\n    pass\n",
    "https://example.com/a?b=c&d=%20#frag",
    "zero\u200bwidth \u00a0nbsp \u3000wide e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x<|im_end|><|endoftext|>y <|im_end",
    "<repo_name>a<file_sep>b",
    "🙂" * 5 + "\u0000\u0007",
]


def generate(prompt, count):
    tokens, first = encode(prompt), None
    answer = []
    for _ in range(count):
        row = logits(tokens + answer)
        first = row if first is None else first
        answer.append(int(row.argmax()))
    top = np.argsort(-first)[:5]
    return {
        "prompt": prompt,
        "tokens": tokens,
        "top": [[int(i), round(float(first[i]), 5)] for i in top],
        "answer": answer,
    }


golden = {
    "runs": [generate(prompt, 12) for prompt in PROMPTS],
    "texts": [{"text": t, "marked": encode(t), "plain": plain(t)} for t in TEXTS],
}
print("{")
print('"runs": [\n' + ",\n".join(json.dumps(run) for run in golden["runs"]) + "\n],")
print('"texts": [\n' + ",\n".join(json.dumps(text) for text in golden["texts"]) + "\n]")
print("}")
