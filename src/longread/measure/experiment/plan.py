"""Which servers an experiment starts, and in which order.

Knows steps. Base, each step alone on the base, and the steps stacked in their order; what is the same server is started
once. Visits go forth and back (A B C, C B A, …), so that a machine that drifts evenly hits all alike.
"""

import hashlib
import json
import re
from dataclasses import dataclass

from longread.measure.experiment.file import Experiment, Server


@dataclass(frozen=True, slots=True)
class Configuration:
    """A server and the steps in it. ``label``: "base", a step's name, or several joined by +."""

    label: str
    steps: tuple[str, ...]
    server: Server


@dataclass(frozen=True, slots=True)
class Visit:
    """One start of a configuration, measured with every workload. ``round``: from 0."""

    round: int
    configuration: Configuration
    identity: str

    @property
    def folder(self) -> str:
        return f"{self.round + 1:02d}-{slug(self.configuration.label)}-{self.identity[:8]}"


def configurations(experiment: Experiment) -> list[Configuration]:
    """Base first, then each step alone, then the stacks; equal servers once, under the first label."""
    base = experiment.base
    found = [Configuration("base", (), base)]
    if experiment.alone:
        found += [Configuration(step.name, (step.name,), step.on(base)) for step in experiment.steps]
    if experiment.stacked:
        server, names = base, []
        for step in experiment.steps:
            server = step.on(server)
            names.append(step.name)
            if len(names) > 1 or not experiment.alone:
                found.append(Configuration(" + ".join(names), tuple(names), server))
    return found


def chosen(all_of_them: list[Configuration], only: tuple[str, ...]) -> list[Configuration]:
    """The base, and what ends in one of the steps named; everything without names."""
    return [each for each in all_of_them if not only or not each.steps or each.steps[-1] in only]


def visits(experiment: Experiment, wanted: list[Configuration]) -> list[Visit]:
    order = []
    for number in range(experiment.visits):
        row = wanted if number % 2 == 0 else wanted[::-1]
        order += [Visit(number, each, identity(experiment, each, number)) for each in row]
    return order


def gate_identity(experiment: Experiment, configuration: Configuration) -> str:
    """Of a gate's result, or of the base's recording: both servers, and what is asked."""
    wanted = experiment.gate
    if wanted is None:
        return ""
    settings = wanted.settings
    asked = [list(settings.lengths), settings.documents, list(settings.levels), settings.seed]
    servers = [_server(experiment.base), _server(configuration.server)]
    return _hash([servers, asked, wanted.profile.document(), experiment.model])


def _server(server: Server) -> list[object]:
    return [list(server.argv), [list(each) for each in server.options], dict(sorted(server.env.items()))]


def _hash(said: object) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def slug(label: str) -> str:
    """As a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", label)[:60]


def identity(experiment: Experiment, configuration: Configuration, number: int) -> str:
    """Of what is measured: a visit with the same one need not be made again, whatever else changed in the file."""
    works = [[work.name, list(work.argv)] for work in experiment.workloads]
    return _hash([_server(configuration.server), works, experiment.model, number])
