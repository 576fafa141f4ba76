"""What the Python participants of `kvx bench compare` have in common: the line protocol, the memory,
the pattern of its blocks, and the measured loop. The protocol is that of `src/bench/proto.rs`."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import sys
import time
from typing import Any, Callable, Protocol, TypedDict

import numpy as np

MARK = b"kvx1 "
PAGE = mmap.PAGESIZE
SPREAD = np.uint64(0x9E37_79B9_7F4A_7C15)
POISON = np.uint64(0xA5A5_A5A5_A5A5_A5A5)
PR_SET_PDEATHSIG = 1
# How long one read may take.
READ_LIMIT_S = 120.0

Settings = dict[str, Any]


class Shape(TypedDict):
    regions: int
    blocks: int
    block_bytes: int


class Case(TypedDict):
    # Lists, as a serving engine hands block ids to its connector.
    remote: list[int]
    local: list[int]


class Memory:
    """Regions of page-aligned private memory, every page of it touched. Not `np.empty`: numpy asks
    the kernel for huge pages for its own arrays, which the other participants' memory does not have."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        if shape["block_bytes"] % 8 or not all(shape.values()):
            raise ValueError("blocks are multiples of 8 bytes, and there is at least one")
        self.bytes = shape["blocks"] * shape["block_bytes"]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        maps = [mmap.mmap(-1, self.bytes, flags=flags) for _ in range(shape["regions"])]
        self.words = [
            np.frombuffer(m, dtype=np.uint64).reshape(shape["blocks"], -1) for m in maps
        ]
        for region in self.words:
            region.fill(0)
        self.bases: list[int] = [region.ctypes.data for region in self.words]

    def pattern(self, seed: int, region: int, block: int) -> np.ndarray:
        # Sums and products of arrays wrap around; those of Python's numbers do not.
        place = (seed + (region << 52) + (block << 24) + 1) % (1 << 64)
        words = self.shape["block_bytes"] // 8
        return (np.arange(words, dtype=np.uint64) + np.uint64(place)) * SPREAD

    def fill(self, seed: int) -> None:
        for index, region in enumerate(self.words):
            for block in range(self.shape["blocks"]):
                region[block] = self.pattern(seed, index, block)

    def poison(self, blocks: list[int]) -> None:
        for region in self.words:
            region[blocks] = POISON

    def wrong_bytes(self, seed: int, remote: int, local: int) -> int:
        wrong = 0
        for index, region in enumerate(self.words):
            right = self.pattern(seed, index, remote).view(np.uint8)
            wrong += int(np.count_nonzero(right != region[local].view(np.uint8)))
        return wrong


class Engine(Protocol):
    """What a participant brings."""

    about: dict[str, Any]
    card: Any

    def submit(self, cases: list[Case]) -> Any:
        """Starts the reads of all cases; what it returns goes to `wait`."""

    def wait(self, pending: Any) -> None:
        """Returns when every byte is there. Raises when that fails."""

    def release(self, pending: Any) -> int:
        """Frees what the reads took; returns how many descriptors went to the transport."""

    def idle(self) -> float | None:
        """Called while nothing is to be done, again after so many seconds; `None`: not needed."""


MakeEngine = Callable[[str, Memory, Settings, Any], Engine]


def spread(count: int, wanted: int) -> list[int]:
    """So many positions out of `count`, evenly spread."""
    wanted = min(wanted, count)
    return [i * count // wanted for i in range(wanted)]


class Participant:
    def __init__(self, make: MakeEngine) -> None:
        self.make = make
        self.engine: Engine | None = None
        self.reader = False
        self.seed = 0
        self.cases: dict[str, Case] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request.get("op"):
            case "setup":
                return self.setup(request)
            case "case":
                return self.case(request)
            case "run":
                return self.run(request)
            case "cpu":
                return {"re": "cpu", "us": time.process_time_ns() // 1000}
            case "quit":
                return {"re": "bye"}
            case other:
                raise ValueError(f"unknown request {other!r}")

    def setup(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.engine is not None:
            raise RuntimeError("it is set up already")
        role = request["role"]
        if role not in ("holder", "reader"):
            raise ValueError(f"unknown role {role!r}")
        self.reader, self.seed = role == "reader", request["seed"]
        self.memory = Memory(request["shape"])
        if not self.reader:
            self.memory.fill(self.seed)
        settings = request.get("settings") or {}
        if settings.get("memory", "host") != "host":
            raise ValueError("it reads host memory only")
        self.engine = self.make(role, self.memory, settings, request.get("card"))
        return {"re": "ready", "card": self.engine.card, "about": self.engine.about}

    def case(self, request: dict[str, Any]) -> dict[str, Any]:
        remote, local = request["remote"], request["local"]
        blocks = self.ready().shape["blocks"]
        if len(remote) != len(local) or not remote:
            raise ValueError("as many local blocks as remote ones, and at least one")
        if not all(0 <= block < blocks for block in (*remote, *local)):
            raise ValueError(f"a block id is not below {blocks}")
        self.cases[request["name"]] = {"remote": remote, "local": local}
        return {"re": "case", "ticket": None}

    def ready(self) -> Memory:
        if self.engine is None:
            raise RuntimeError("it is not set up yet")
        return self.memory

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        memory = self.ready()
        if not self.reader:
            raise RuntimeError("only a reader reads")
        cases = [self.cases[name] for name in request["names"]]
        sampled = []
        for case in cases:
            for i in spread(len(case["local"]), request["verify"]):
                sampled.append((case["remote"][i], case["local"][i]))
        samples = []
        for left in reversed(range(request["times"])):
            if left == 0 and sampled:
                memory.poison([local for _, local in sampled])
            if request.get("pause_us"):
                time.sleep(request["pause_us"] / 1e6)
            samples.append(self.read(cases))
        wrong = sum(memory.wrong_bytes(self.seed, *pair) for pair in sampled) if samples else 0
        block = memory.shape["regions"] * memory.shape["block_bytes"]
        checked = len(sampled) * block if samples else 0
        return {"re": "ran", "samples": samples, "checked_bytes": checked, "wrong_bytes": wrong}

    def read(self, cases: list[Case]) -> dict[str, Any]:
        engine, shape = self.engine, self.memory.shape
        assert engine is not None
        cpu = time.process_time_ns()
        start = time.perf_counter_ns()
        pending = engine.submit(cases)
        submitted = time.perf_counter_ns()
        engine.wait(pending)
        end = time.perf_counter_ns()
        cpu = time.process_time_ns() - cpu
        descriptors = engine.release(pending)
        blocks = sum(len(case["local"]) for case in cases)
        return {
            "submit_us": (submitted - start) / 1e3,
            "total_us": (end - start) / 1e3,
            "descriptors": descriptors,
            "bytes": blocks * shape["regions"] * shape["block_bytes"],
            "cpu_us": cpu / 1e3,
        }


class Lines:
    """Lines of standard input, with something to do while there is none."""

    def __init__(self) -> None:
        self.buffer = bytearray()

    def next(self, idle: Callable[[], float | None]) -> bytes | None:
        while (end := self.buffer.find(b"\n")) < 0:
            if not select.select([0], [], [], idle())[0]:
                continue
            data = os.read(0, 1 << 20)
            if not data:
                return None
            self.buffer += data
        line = bytes(self.buffer[:end])
        del self.buffer[: end + 1]
        return line


def decode(line: bytes) -> dict[str, Any]:
    request = json.loads(line.removeprefix(MARK)) if line.startswith(MARK) else None
    if not isinstance(request, dict):
        raise ValueError("not a request")
    return request


def explain(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def main(make: MakeEngine) -> None:
    # Dies with its parent.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get("KVX_PARENT_PID")
    if parent and parent != str(os.getppid()):
        sys.exit("the parent is gone")
    # Ctrl-C is the parent's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Libraries print to standard output, also in the middle of a line of ours.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    participant, lines = Participant(make), Lines()

    def idle() -> float | None:
        return participant.engine.idle() if participant.engine else None

    while (line := lines.next(idle)) is not None:
        try:
            answer = participant.answer(decode(line))
        except Exception as error:  # whatever it is, the parent shall read it
            answer = {"re": "failed", "error": explain(error)}
        output.write(MARK + json.dumps(answer).encode() + b"\n")
        output.flush()
        if answer["re"] == "bye":
            break
    # No clean-up of the libraries: with the system's RDMA libraries installed UCX crashes in its own.
    os._exit(0)
