"""Planted faults of the prefix tree, the host tier and the market."""

from __future__ import annotations

from tests.faults import Fault

MODEL = ("tests/memory/test_prefix_tree_model.py::test_tree_agrees_with_naive_model[full window state]",)
TREE = ("tests/memory/test_prefix_tree.py",)
HOST = ("tests/memory/test_host_tier.py",)
MARKET = ("tests/memory/test_market.py",)

_ROLLING = "tests/memory/test_rolling_checkpoints.py::"

FAULTS = [
    Fault(
        "attention prefix hit without its state",
        "memory.ledger.prefix_nodes",
        old="return node.bundle is not None or not self._blocks.bundled",
        new="return True",
        tests=TREE,
    ),
    Fault(
        "window page let go one too early",
        "memory.ledger.prefix_blocks",
        old="return max(0, num_tokens - window + 1) // page_tokens",
        new="return -(-max(0, num_tokens - window + 1) // page_tokens)",
        tests=TREE,
    ),
    Fault(
        "window page kept one too long",
        "memory.ledger.prefix_blocks",
        old="return max(0, num_tokens - window + 1) // page_tokens",
        new="return max(0, num_tokens - window) // page_tokens",
        tests=TREE,
    ),
    Fault(
        "state taken at an unaligned position",
        "memory.ledger.prefix_tree",
        old=" or (self._blocks.bundled and end != num_tokens)",
        new="",
        tests=TREE,
    ),
    Fault(
        "window page of two bundles freed with the first",
        "memory.ledger.prefix_holdings",
        old="gone += [page for page in ids if _count(self.held[name], page, -1) == 0]",
        new="gone += [page for page in ids if _count(self.held[name], page, -self.held[name][page]) == 0]",
        tests=TREE,
    ),
    Fault(
        "locked pages credited as evictable",
        "memory.ledger.prefix_tree",
        old="num_free = len(self._nodes) - self._num_locked",
        new="num_free = len(self._nodes)",
        tests=MODEL,
    ),
    Fault(
        "locked bundle credited as evictable",
        "memory.ledger.prefix_holdings",
        old="held[name] - len(ids) * self._rules[name].page_bytes for name, ids in self.locked.items()",
        new="held[name] for name, ids in self.locked.items()",
        tests=MODEL,
    ),
    Fault(
        "locked bundle evicted",
        "memory.ledger.prefix_nodes",
        old="return self.bundle is not None and self.bundle.locks == 0",
        new="return self.bundle is not None",
        tests=TREE,
    ),
    Fault(
        "block above a locked one evicted",
        "memory.ledger.prefix_nodes",
        old="return self.num_children == 0 and not self.locked",
        new="return self.num_children == 0",
        tests=TREE,
    ),
    Fault(
        "eviction for one kind stops at another's bytes",
        "memory.ledger.prefix_tree",
        old="while any(len(gone[n]) * self._blocks.rules[n].page_bytes < wanted[n] for n in names):",
        new="while all(len(gone[n]) * self._blocks.rules[n].page_bytes < wanted[n] for n in names):",
        tests=MODEL,
    ),
    Fault(
        "blocks that lead nowhere stay",
        "memory.ledger.prefix_tree",
        old="if not step.is_free_leaf or self._order.is_useful(step):",
        new="if step is not None:",
        tests=MODEL,
    ),
    Fault(
        "salt left out of the hash",
        "memory.ledger.prefix_blocks",
        old='f"{self._model}\\0{salt}"',
        new='f"{self._model}"',
        tests=TREE,
    ),
    Fault(
        "hash of a block without what came before",
        "memory.ledger.prefix_blocks",
        old="digest_size=16, key=before",
        new="digest_size=16",
        tests=TREE,
    ),
    Fault(
        "one id taken for two contents",
        "memory.ledger.prefix_holdings",
        old="            elif exclusive:",
        new="            elif False:",
        tests=TREE,
    ),
    Fault(
        "eviction scans all leaves",
        "memory.ledger.prices",
        old="        while self._heap:\n",
        new="        self._drop_stale()\n        while self._heap:\n",
        tests=(
            "tests/memory/test_prefix_tree.py::test_evicting_costs_the_same_at_a_thousand_and_a_hundred_thousand_leaves",
        ),
    ),
    Fault(
        "prices without ageing",
        "memory.ledger.prefix_nodes",
        old="self.clock = max(self.clock, priority)",
        new="self.clock = 0.0",
        tests=TREE,
    ),
    Fault(
        "pinned host page put out",
        "memory.ledger.host_tier",
        old="for virtual, entry in self._entries[group].items() if not entry.pins",
        new="for virtual, entry in self._entries[group].items()",
        tests=HOST,
    ),
    Fault(
        "host slab of a pinned page given away",
        "memory.ledger.host_tier",
        old="if s.used and not s.pins and s.group != group",
        new="if s.used and s.group != group",
        tests=HOST,
    ),
    Fault(
        "market without hysteresis",
        "memory.ledger.market",
        old="if expert > self._hysteresis * prefix:",
        new="if expert > prefix:",
        tests=MARKET,
    ),
    Fault(
        "market blind to what eviction cost",
        "memory.ledger.market",
        old="return max(ghosts, COLDEST_SHARE * average) / elapsed",
        new="return COLDEST_SHARE * average / elapsed",
        tests=MARKET,
    ),
    Fault(
        "market lets requests starve the experts",
        "memory.ledger.market",
        old="hold_new = missing > 0 and not self._pays(experts, running)",
        new="hold_new = False",
        tests=MARKET,
    ),
    Fault(
        "prefix: checkpoints of an output pile up",
        "memory.ledger.cache",
        "            if holding.rolling_node != NO_NODE:\n                self.forget(",
        "            if False:\n                self.forget(",
        (f"{_ROLLING}test_a_rolling_checkpoint_takes_the_place_of_the_last",),
    ),
    Fault(
        "prefix: a checkpoint that was used gives way",
        "memory.ledger.prefix_tree",
        "if old.hits or not old.has_free_bundle:",
        "if not old.has_free_bundle:",
        (f"{_ROLLING}test_one_that_others_went_on_from_stays",),
    ),
    Fault(
        "prefix: the next checkpoint keeps the price of the one it replaced",
        "memory.ledger.prefix_tree",
        "new.bundle.base_tokens = old.bundle.base_tokens",
        "pass",
        (f"{_ROLLING}test_a_superseded_bundle_leaves_its_price_to_the_next",),
    ),
    Fault(
        "prefix: every checkpoint of an output goes to the host",
        "memory.ledger.spill",
        "waits = rolling and name in self._blocks.bundled",
        "waits = False",
        (f"{_ROLLING}test_only_the_last_one_goes_to_the_host",),
    ),
    Fault(
        "prefix: the last checkpoint of an output never goes to the host",
        "memory.ledger.spill",
        "                    self._waiting.append((group, virtual, self._content[group][virtual]))",
        "                    pass",
        (f"{_ROLLING}test_only_the_last_one_goes_to_the_host",),
    ),
    Fault(
        "prefix: what is computed sooner is copied",
        "memory.ledger.spill",
        "if self._cost.span_ms(base_tokens, num_tokens) > 1e3 * num_bytes / LINK_BYTES_PER_S:",
        "if True:",
        ("tests/memory/test_spill.py",),
    ),
    Fault(
        "a page that is still to come from the host is copied",
        "memory.ledger.relocation",
        "awaited = virtual in self.fresh[group] or ",
        "awaited = ",
        (
            "tests/worker/scheduling/test_scheduler_prefixes.py::test_prefixes_come_back_from_the_host_as_they_were",
        ),
    ),
    Fault(
        "scheduler: what comes back from the host is not kept",
        "worker.scheduling.prefixes",
        "if match.host_bytes:",
        "if False:",
        ("tests/worker/scheduling/test_scheduler_prefixes.py::test_what_came_back_from_the_host_is_kept",),
    ),
    Fault(
        "scheduler: an output is never offered",
        "worker.scheduling.prefixes",
        "if not rolling or outputs < OUTPUTS_A_STEP:",
        "if not rolling:",
        (
            "tests/worker/scheduling/test_scheduler_prefixes.py::test_of_an_output_the_last_place_is_kept_and_no_other",
        ),
    ),
]
