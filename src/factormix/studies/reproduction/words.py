"""The verdicts in plain words: one sentence for each topic and outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from factormix.studies.reproduction.verdicts import Finding
from factormix.views.report import Status

__all__ = ["in_plain_words"]

WORDS: dict[str, dict[Status, str]] = {
    "starts": {
        "held": "Training from random values, without a start by k-means, converged from every"
        " random start",
        "held with a change": "Training from random values converged from nearly every start",
        "not found": "Training from random values did not converge reliably",
    },
    "rest": {
        "held": "The paper's 15 + 50 epochs are long enough for the likelihood to level off",
        "held with a change": "The paper's 15 + 50 epochs are nearly always long enough for the"
        " likelihood to level off",
        "not found": "The paper's 15 + 50 epochs are too few for the likelihood to level off",
    },
    "table": {
        "held": "The outlier AUC of Table I was found as the paper gives it",
        "held with a change": "The outlier AUC of Table I was found only in another reading of the"
        " text, which the list of claims names",
        "not found": "The outlier AUC of Table I was not found, neither by the text nor with any"
        " one change that would explain the numbers of both models",
    },
    "better": {
        "held": "The mixture of factor analyzers detects the class that the paper holds out better"
        " than a Gaussian mixture of as many components, as the paper says",
        "held with a change": "The mixture of factor analyzers is not clearly better for the class"
        " that the paper holds out, but it is on average over the ten classes",
        "not found": "The mixture of factor analyzers is better than a Gaussian mixture of as many"
        " components neither for the class that the paper holds out nor on average",
    },
    "svhn": {
        "held": "Outliers are detected on SVHN",
        "held with a change": "Outliers are detected on SVHN, for which the paper gives no number",
        "not found": "On SVHN, which the abstract names, the likelihood does not reliably tell a"
        " new class from the others",
    },
    "stream": {
        "held": "A stream that is scored before it is learned notices a new class at once",
        "held with a change": "A stream that is scored before it is learned notices one new class"
        " at once, but not the other",
        "not found": "A stream that is scored before it is learned does not notice a new class",
    },
    "cost": {
        "held": "Scoring after every update is cheaper in precision form than with a covariance,"
        " whether factored or dense",
        "held with a change": "Scoring after every update is cheaper in precision form than with a"
        " dense covariance, but not than with a factored one",
        "not found": "Scoring after every update is not cheaper in precision form",
    },
}


def in_plain_words(findings: Sequence[Finding]) -> str:
    """Say in a list what held, with the data sets that each sentence is about."""
    number = Counter(one.status for one in findings)
    first = (
        f"Of {len(findings)} claims {number['held']} held, {number['held with a change']} held with"
        f" a change, and {number['not found']} were not found."
    )
    sentences = []
    for topic, phrases in WORDS.items():
        for status, phrase in phrases.items():
            chosen = [one for one in findings if (one.topic, one.status) == (topic, status)]
            about = ", ".join(dict.fromkeys(one.about for one in chosen if one.about))
            if chosen:
                sentences.append(f"- {phrase} ({about})." if about else f"- {phrase}.")
    return f"**{first}**\n\n" + "\n".join(sentences)
