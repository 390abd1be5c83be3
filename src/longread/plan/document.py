"""Plans as JSON: schema ``longread.plan/1``, every number in base units, intervals as [low, centre, high].

Additions keep the number; a change of meaning raises it. Knows the results of ``search`` and ``survey``.
"""

from typing import Any

from longread.plan.candidate import Binding, Candidate, Refusal, SearchResult
from longread.plan.deployment import Deployment, Workload
from longread.plan.estimate import Estimate
from longread.plan.gpu_memory import Capacity, GpuMemory
from longread.plan.peer_capacity import PeerCapacity
from longread.plan.survey import Survey
from longread.plan.timing import Timing
from longread.spec.hardware import Hardware

SCHEMA = "longread.plan/1"
Json = dict[str, Any]


def search_document(r: SearchResult) -> Json:
    """Of a ranked search."""
    return {
        "schema": SCHEMA,
        "kind": "search",
        "model": r.spec.label,
        "family": r.spec.family,
        "hardware": hardware(r.hardware),
        "workload": workload(r.workload),
        "floors": dict(r.floors),
        "rule": r.rule,
        "notes": list(r.notes),
        "considered": r.considered,
        "feasible": [candidate(c, rank) for rank, c in enumerate(r.feasible, 1)],
        "infeasible": [refusal(f) for f in r.infeasible],
    }


def survey_document(s: Survey) -> Json:
    """Of one deployment's memory and capacity."""
    d = s.deployment
    return {
        "schema": SCHEMA,
        "kind": "survey",
        "model": d.spec.label,
        "family": d.spec.family,
        "hardware": hardware(d.hardware),
        "deployment": deployment(d),
        "chosen": s.chosen,
        "fits": s.fits,
        "max_context": s.longest,
        "memory": memory(s.memory),
        "capacity": [capacity(c) for c in s.capacities],
        "triangle": [
            {"context": c.context, "concurrency": c.concurrency, "bytes": c.size, "fits": c.fits} for c in s.triangle
        ],
        "peers": [peer(p) for p in s.peers],
        "peer_max_context": dict(s.peer_longest),
        "refused": dict(s.refused),
        "published": [
            {
                "said": fact.said,
                "source": fact.source,
                "unknown": fact.unknown,
                "deployment": deployment(fact.deployment),
                "drafter": fact.drafter,
                "context": fact.context,
                "fits": fact.fits,
                "shown_gb": list(fact.shown) if fact.shown is not None else None,
            }
            for fact in s.published
        ],
    }


def hardware(h: Hardware) -> Json:
    figures = {
        "memory": h.card.memory,
        "usable": h.card.usable,
        "bandwidth": h.card.bandwidth,
        "nvlink": h.card.nvlink,
        "pcie": h.card.pcie,
        "network": h.network,
        "host_memory": h.host_memory,
        "disk_read": h.disk_read,
        **{f"flops.{name}": figure for name, figure in h.card.flops.items()},
    }
    return {
        "label": h.label,
        "card": h.card.name,
        "gpus": h.gpus,
        "nodes": h.nodes,
        "figures": {
            name: {"value": f.value, "mark": f.mark, "source": f.source} for name, f in figures.items() if f is not None
        },
    }


def workload(w: Workload) -> Json:
    return {
        "isl": w.isl,
        "osl": w.osl,
        "prefix": w.prefix,
        "cached": w.cached,
        "concurrency": w.concurrency,
        "tier": w.tier,
        "slo": {"ttft": w.ttft_target, "tpot": w.tpot_target},
    }


def deployment(d: Deployment) -> Json:
    s = d.strategy
    return {
        "engine": d.engine,
        "strategy": {
            "label": s.label,
            "tp": s.tp,
            "pp": s.pp,
            "cp": s.cp,
            "dp": s.dp,
            "ep": s.ep,
            "replicas": s.replicas,
        },
        "experts": d.experts,
        "cache": d.cache,
        "max_num_batched_tokens": d.chunk,
        "max_num_seqs": d.max_num_seqs,
        "max_model_len": d.max_model_len,
        "gpu_memory_utilization": d.memory_share,
        "host_cache_bytes": d.host_cache,
    }


def candidate(c: Candidate, rank: int) -> Json:
    t = c.times
    return {
        "rank": rank,
        "runs_today": c.runs_today,
        "deployment": deployment(c.deployment),
        "tier": c.workload.tier,
        "sessions": c.sessions,
        "meets": dict(c.meets),
        "binding": binding(c.binding),
        "score": c.score,
        "lost": c.lost,
        "lossy": list(c.lossy),
        "notes": list(c.notes),
        "ttft": {
            "cold": timing(t.cold),
            "warm": timing(t.warm) if t.warm is not None else None,
            "at_load": estimate(t.load),
            "last_of_burst": estimate(t.burst),
        },
        "tpot": {"alone": timing(t.alone), "at_load": estimate(t.steady), "stall": estimate(t.stall)},
        "throughput": estimate(t.rate),
        "memory": memory(c.memory),
        "capacity": capacity(c.capacity),
        "peer": peer(c.peer) if c.peer is not None else None,
    }


def estimate(e: Estimate) -> Json:
    return {"interval": [e.low, e.centre, e.high], "floor": e.floor, "provenance": e.provenance, "source": e.source}


def timing(t: Timing) -> Json:
    return {**estimate(t.total), "parts": {name: estimate(e) for name, e in t.parts.items()}}


def binding(b: Binding) -> Json:
    return {"name": b.name, "value": b.value, "limit": b.limit, "unit": b.unit, "margin": b.margin, "why": b.why}


def memory(m: GpuMemory) -> Json:
    return {
        "stage": m.stage,
        "usable": m.usable,
        "weights": dict(m.weights),
        "parts": {name: {"bytes": part.size, "source": part.source} for name, part in m.parts.items()},
        "free": m.free,
        "kv_per_token": dict(m.kv_per_token),
        "kv_fixed": dict(m.kv_fixed),
        "snapshot_bytes": m.snapshot_bytes,
        "sharing": dict(m.sharing),
    }


def capacity(c: Capacity) -> Json:
    return {
        "context": c.context,
        "tokens": c.tokens,
        "sessions": c.sessions,
        "whole_sessions": c.whole,
        "session_bytes": c.session_bytes,
        "cards_a_session": c.cards_a_session,
        "caches": c.caches,
    }


def peer(p: PeerCapacity) -> Json:
    return {
        "engine": p.engine,
        "context": p.context,
        "pool_bytes": p.pool_bytes,
        "reported_tokens": p.reported_tokens,
        "reported_sessions": p.reported_sessions,
        "metric_tokens": p.metric_tokens,
        "sessions": p.sessions,
        "fixed_bytes": p.fixed_bytes,
        "token_bytes": p.token_bytes,
        "ideal_sessions": p.ours,
        "why": p.why,
    }


def refusal(f: Refusal) -> Json:
    return {
        "kind": f.kind,
        "engines": list(f.engines),
        "deployments": f.what,
        "count": f.count,
        "limit": f.limit,
        "value": f.value,
        "bound": f.bound,
        "unit": f.unit,
        "over": f.by,
        "cure": f.cure,
    }
