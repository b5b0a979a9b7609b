"""A record of results.json, as nmt-eval writes it."""

from nmt.evaluate.results import Result, ScoredTestSet
from nmt.score.score import Score

RESULT = Result(
    "2026-11-21T20:00:00Z",
    "average",
    100,
    ["step-0000090", "step-0000100"],
    "a" * 64,
    "b" * 64,
    ScoredTestSet("newstest2014", 3003, "c" * 64, "d" * 64),
    "en-de",
    "e" * 64,
    {"beam": 4, "penalty": "gnmt", "length_penalty": 0.6, "top_k": None, "sample": False},
    "nmt",
    [
        Score("BLEU", 27.3, "nrefs:1|tok:13a", 26.9, 27.7),
        Score("chrF2", 55.0, "nrefs:1|nc:6"),
    ],
    {"nmt": "0.1.0", "python": "3.11"},
    12.5,
)
