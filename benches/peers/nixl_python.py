"""A participant of `kvx bench compare`: NIXL's Python package, driven as vLLM's NIXL connector
drives it.

Descriptor lists of all blocks of all regions are prepared once for either side. A read turns its
block ids, in the order in which they come, into indices of those lists, makes a request of them,
posts it, polls it to its end and releases it. The holder is notified and fetches notifications in
between, as an engine does between its steps.

Settings: `progress_thread` (true, as by default, or false), `num_threads` of the UCX backend (4, as
vLLM sets it; 0 is the package's own default), `transport` (`auto`, or `tcp`).

The package names torch among its requirements, yet `_api` imports it for type checkers only: arrays
of addresses come in as numpy arrays, and torch is neither installed nor missed.
"""

from __future__ import annotations

import base64
import importlib.metadata
import os
import time
import uuid
from typing import Any

import numpy as np
from peer import READ_LIMIT_S, Case, Memory, Settings, main

PACKAGE = "nixl-cu12"


def descriptors(bases: list[int], blocks: int, block_bytes: int) -> np.ndarray:
    """Address, length and device of every block, region by region."""
    rows = np.empty((len(bases) * blocks, 3), dtype=np.uint64)
    offsets = np.arange(blocks, dtype=np.uint64) * np.uint64(block_bytes)
    rows[:, 0] = (np.array(bases, dtype=np.uint64)[:, None] + offsets[None, :]).ravel()
    rows[:, 1] = block_bytes
    rows[:, 2] = 0
    return rows


class NixlPython:
    def __init__(self, role: str, memory: Memory, settings: Settings, card: Any) -> None:
        transport = settings.get("transport", "auto")
        # Read once, when the library is loaded. The first is what vLLM sets.
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
        if transport == "tcp":
            os.environ["UCX_TLS"] = "tcp"
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        self.progress_thread = settings.get("progress_thread", True)
        self.transport = transport
        threads = settings.get("num_threads", 4)
        config = nixl_agent_config(
            enable_prog_thread=self.progress_thread, num_threads=threads, capture_telemetry=True
        )
        self.agent = nixl_agent(f"{role}-{uuid.uuid4()}", config)
        if "UCX" not in self.agent.backends:
            raise RuntimeError("NIXL has no UCX backend here")
        regions = [(base, memory.bytes, 0, "") for base in memory.bases]
        self.registered = self.agent.register_memory(regions, mem_type="DRAM", backends=["UCX"])
        self.regions, self.blocks = memory.shape["regions"], memory.shape["blocks"]
        self.about = {
            "library": PACKAGE,
            "version": importlib.metadata.version(PACKAGE),
            "transport": transport,
            "memory": "host",
            "progress_thread": self.progress_thread,
            "num_threads": threads,
        }
        self.reader = role == "reader"
        if not self.reader:
            metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
            self.card = {"metadata": metadata, "bases": memory.bases}
            return
        self.card = None
        remote = self.agent.add_remote_agent(base64.b64decode(card["metadata"]))
        if isinstance(remote, bytes):
            remote = remote.decode()
        self.local_list = self.prepare("NIXL_INIT_AGENT", memory.bases, memory)
        self.remote_list = self.prepare(remote, card["bases"], memory)

    def prepare(self, agent: str, bases: list[int], memory: Memory) -> Any:
        rows = descriptors(bases, memory.shape["blocks"], memory.shape["block_bytes"])
        return self.agent.prep_xfer_dlist(agent, self.agent.get_xfer_descs(rows, mem_type="DRAM"))

    def indices(self, blocks: list[int]) -> np.ndarray:
        regions = np.arange(self.regions)[:, None]
        return (regions * self.blocks + np.array(blocks)[None, :]).flatten()

    def submit(self, cases: list[Case]) -> Any:
        handles = []
        for case in cases:
            handle = self.agent.make_prepped_xfer(
                "READ",
                self.local_list,
                self.indices(case["local"]),
                self.remote_list,
                self.indices(case["remote"]),
                b"read:1",
            )
            self.agent.transfer(handle)
            handles.append(handle)
        return handles

    def wait(self, pending: Any) -> None:
        end = time.monotonic() + READ_LIMIT_S
        left = list(pending)
        while left:
            handle = left[-1]
            state = self.agent.check_xfer_state(handle)
            if state == "DONE":
                left.pop()
            elif state != "PROC":
                raise RuntimeError(f"NIXL says {state}")
            elif time.monotonic() > end:
                raise TimeoutError(f"the read did not end within {READ_LIMIT_S:.0f} s")

    def release(self, pending: Any) -> int:
        count = 0
        for handle in pending:
            count += self.agent.get_xfer_telemetry(handle).descCount
            self.agent.release_xfer_handle(handle)
        return count

    def idle(self) -> float | None:
        if self.reader:
            return None
        self.agent.get_new_notifs()
        # Over TCP the holder's own processor sends what is read. Without a progress thread that
        # happens here.
        return 0.0 if self.transport == "tcp" and not self.progress_thread else 0.001


if __name__ == "__main__":
    main(NixlPython)
