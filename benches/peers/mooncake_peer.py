"""A participant of `kvx bench compare`: Mooncake's transfer engine over TCP.

Peers find each other without a metadata server (`P2PHANDSHAKE`). A read is one batch of all its
pieces; neighbours on both sides are merged first, as Mooncake's connectors for serving engines do.
The batch is read by `batch_transfer_sync_read`, which keeps its caller to the end; the asynchronous
call and a wait for it took as long.

By default a batch of more than some two thousand pieces is refused (return value -1, "TCP lane
queue-full"). So its queues are made as long as it accepts, and larger batches are cut.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import numpy as np
from peer import Case, Memory, Settings, main

PACKAGE = "mooncake-transfer-engine-non-cuda"
ADDRESS = "127.0.0.1"
# The longest queue that it accepts, and how many bytes of a piece take one place of it.
QUEUE = 65535
SLICE_BYTES = 64 << 10
QUEUES = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(QUEUE),
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": str(QUEUE),
    "MC_TCP_ADMISSION_TIMEOUT_MS": "30000",
}


def runs(remote: np.ndarray, local: np.ndarray) -> np.ndarray:
    """Where in both lists a block does not follow the one before it on both sides."""
    breaks = np.flatnonzero((np.diff(remote) != 1) | (np.diff(local) != 1)) + 1
    return np.concatenate(([0], breaks, [len(remote)]))


def batches(lengths: list[int]) -> list[tuple[int, int]]:
    """Cuts pieces of these lengths into ranges that the queues hold."""
    places = np.cumsum([-(-length // SLICE_BYTES) for length in lengths])
    ranges, start = [], 0
    while start < len(lengths):
        before = places[start - 1] if start else 0
        end = max(int(np.searchsorted(places, before + QUEUE, side="right")), start + 1)
        ranges.append((start, end))
        start = end
    return ranges


class Mooncake:
    def __init__(self, role: str, memory: Memory, settings: Settings, card: Any) -> None:
        for name, value in QUEUES.items():
            os.environ.setdefault(name, value)
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        if code := self.engine.initialize(ADDRESS, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"Mooncake's initialize returned {code}")
        sizes = [memory.bytes] * len(memory.bases)
        if code := self.engine.batch_register_memory(memory.bases, sizes):
            raise RuntimeError(f"Mooncake's batch_register_memory returned {code}")
        self.memory = memory
        self.block_bytes = memory.shape["block_bytes"]
        self.remote_bases: list[int] = []
        self.peer = ""
        self.about = {
            "library": PACKAGE,
            "version": importlib.metadata.version(PACKAGE),
            "transport": "tcp",
            "memory": "host",
        }
        if role == "holder":
            port = self.engine.get_rpc_port()
            self.card = {"peer": f"{ADDRESS}:{port}", "bases": memory.bases}
        else:
            self.card = None
            self.peer, self.remote_bases = card["peer"], card["bases"]

    def submit(self, cases: list[Case]) -> Any:
        count = 0
        for case in cases:
            pieces = self.pieces(case)
            count += len(pieces[0])
            for start, end in batches(pieces[2]):
                part = [values[start:end] for values in pieces]
                if code := self.engine.batch_transfer_sync_read(self.peer, *part):
                    raise RuntimeError(f"Mooncake's batch_transfer_sync_read returned {code}")
        return count

    def pieces(self, case: Case) -> tuple[list[int], list[int], list[int]]:
        remote, local = np.array(case["remote"]), np.array(case["local"])
        bounds = runs(remote, local)
        first = bounds[:-1]
        lengths = (np.diff(bounds) * self.block_bytes).tolist()

        def addresses(bases: list[int], blocks: np.ndarray) -> list[int]:
            offsets = blocks[first] * self.block_bytes
            return (np.array(bases)[:, None] + offsets[None, :]).ravel().tolist()

        return (
            addresses(self.memory.bases, local),
            addresses(self.remote_bases, remote),
            lengths * len(self.remote_bases),
        )

    def wait(self, pending: Any) -> None:
        pass

    def release(self, pending: Any) -> int:
        return pending

    def idle(self) -> float | None:
        return None


if __name__ == "__main__":
    main(Mooncake)
