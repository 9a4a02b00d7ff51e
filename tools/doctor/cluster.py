"""What a running cluster worries about, and whether a prompt is found where it was warmed."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Collection
from typing import Any

from events.load import OWN_ENGINE
from tools.admin import AdminClient
from tools.doctor.finding import Finding, Verdict

MEANINGS = {
    "no_events": ("it is routed as if it held nothing", "its log says why it publishes nothing"),
    "stale_digest": ("its cache is trusted less and less", "is the bus reachable from it?"),
    "false_hits": ("it holds less than its digest claims", "raise `digest_bits` of its replicas"),
    "loads_fall_short": (
        "less KV comes from there than is shown",
        "`warmroute kv stats`, and its log",
    ),
    "impossible_usage": ("it tells of more tokens than there are", "its version, and its log"),
    "nothing_matches": ("router and replica name blocks differently", "one version on both sides"),
    "salt_unknown": ("tenants' own blocks are never found", "the same tenants on both sides"),
    "backend_down": ("its server does not answer", "does it run, and at this url?"),
    "other_pool": (
        "it shares no cached prompt with most replicas",
        "the same `dtype` and `block_tokens` everywhere",
    ),
    "salt_refused": ("it answers nobody", "`cache_salt = false` for it, `up --no-cache-salt`"),
    "backend_refuses": (
        "it answers some or all with a 4xx",
        "its key, `model`, and what it offers",
    ),
    "replica_away": ("named in the cluster file, not heard of", "does it run? its log"),
    "replica_stalled": ("it is stopped or overloaded", "its log, and the machine's load"),
    "block_size_mismatch": ("refused: other block size", "the same `block_tokens` everywhere"),
    "template_mismatch": ("refused: other chat template", "the same model files everywhere"),
    "tokenizer_mismatch": ("refused: other tokenizer", "the same model files everywhere"),
    "weights_mismatch": ("refused: other weights", "the same files, or a `[[revisions]]` section"),
    "model_mismatch": ("refused: other model", "one cluster serves one model"),
    "layout_mismatch": ("refused: other KV layout", "the same model files everywhere"),
    "key_mismatch": ("refused: other cluster secret", "the same `secret` everywhere"),
    "hash_version_mismatch": ("refused: other version", "one version of warmroute everywhere"),
    "bus_silent": ("nobody's cache or load is known", "does the nats-server run, and answer?"),
    "registry_offline": ("shared settings are not kept", "is JetStream on in the nats-server?"),
    "fleet_full": ("more replicas than a router can hold", "a second cluster"),
    "index_full": ("no memory for its digest", "a smaller `digest_bits`"),
}
"""Alarm: what it means for the cluster, what to look at first."""

PROBE_WORDS = 120


async def cluster_findings(
    admin: AdminClient, configured: Collection[str] = ()
) -> AsyncIterator[Finding]:
    """Of the gateway that runs; `configured` replicas should be there, known to it or not.
    Raises CommandError when it doesn't answer."""
    replicas = await admin.replicas()
    serving = [of for of in replicas if of["linked"] and not of["misfits"]]
    lost = sorted({*configured}.difference(of["replica"] for of in replicas))
    known = len(replicas) + len(lost)
    logs = "their logs in the state folder"
    if not serving:
        text = f"{known} replicas known, none takes requests"
        yield Finding(Verdict.BROKEN, "replicas", text, logs)
        return
    verdict = Verdict.GOOD if len(serving) == known else Verdict.SLOW
    absent = f"; not there: {', '.join(lost)}" if lost else ""
    text = f"{len(serving)} of {known} take requests{absent}"
    yield Finding(verdict, "replicas", text, logs if lost else "")
    for alarm in await admin.alarms():
        yield alarm_finding(alarm)
    if any(of["hello"]["engine"] == OWN_ENGINE for of in serving):
        yield probe_finding(await admin.warm(_probe()))
    else:
        yield Finding(Verdict.GOOD, "locality", "not probed: only servers of other kinds answer")


def alarm_finding(alarm: dict[str, Any]) -> Finding:
    """One alarm in plain words."""
    means, remedy = MEANINGS.get(alarm["name"], (alarm["detail"], ""))
    whose = f" of {alarm['replica']}" if alarm["replica"] else ""
    text = f"alarm {alarm['name']}{whose} for {alarm['age_s']:.0f} s: {means}"
    return Finding(Verdict.BROKEN, "alarm", text, remedy)


def probe_finding(warmed: dict[str, Any]) -> Finding:
    """Whether the prompt that was just made warm is found again."""
    found = [of["cached_tokens"] for of in warmed["replicas"]]
    if found and min(found) > 0:
        text = f"a prompt made warm a moment ago is found: {min(found)} tokens of it"
        return Finding(Verdict.GOOD, "locality", text)
    remedy = "the alarms above, and `warmroute explain --prompt TEXT`"
    return Finding(
        Verdict.BROKEN, "locality", "a prompt made warm a moment ago is not found again", remedy
    )


def _probe() -> dict[str, Any]:
    """A prompt that nobody has asked before."""
    words = " ".join(secrets.token_hex(2) for _ in range(PROBE_WORDS))
    return {"prompt": words, "tenant": "default", "replicas": 1}
