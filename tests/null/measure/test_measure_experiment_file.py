"""An experiment's file: what it means, and what is said where it is wrong."""

import shlex
from pathlib import Path

import pytest

from longread.cli.checkpoint import locate
from longread.cli.experiment import job_of
from longread.measure.experiment.file import Experiment, grouped, read_experiment
from longread.measure.experiment.plan import chosen, configurations, identity, visits
from longread.spec.errors import ConfigError

WHOLE = """\
name = "an experiment"

[base]
command = "vllm serve /models/v3 --port {port} --max-num-seqs 8"
options = {enforce-eager = true, max-model-len = 4096}
env = {A = "1"}

[[step]]
name = "more"
options = "--max-num-seqs=16 --block-size 32"

[[step]]
name = "graphs"
remove = ["--enforce-eager"]
env = {B = "2"}

[[step]]
name = "both"
options = ["--x", "-1"]

[[workload]]
name = "long"
dataset-name = "documents"
num_prompts = 4
isl = 1024
ignore-eos = true
goodput = ["ttft:200", "tpot:50"]

[gate]
profile = "fp8-class"
levels = [0, 4]
lengths = ["2K"]

[run]
visits = 3
"""


def read(tmp_path: Path, text: str) -> Experiment:
    path = tmp_path / "x.toml"
    path.write_text(text)
    return read_experiment(path, job_of, locate)


def test_steps_replace_remove_and_add(tmp_path):
    experiment = read(tmp_path, WHOLE)
    found = {each.label: each.server for each in configurations(experiment)}
    assert list(found) == ["base", "more", "graphs", "both", "more + graphs", "more + graphs + both"]
    shown = {label: shlex.join(server.launch().argv) for label, server in found.items()}
    start = "vllm serve /models/v3 --port '{port}'"
    assert shown["base"] == f"{start} --max-num-seqs 8 --enforce-eager --max-model-len 4096"
    assert shown["more"] == f"{start} --max-num-seqs 16 --enforce-eager --max-model-len 4096 --block-size 32"
    assert shown["graphs"] == f"{start} --max-num-seqs 8 --max-model-len 4096"
    assert shown["more + graphs + both"] == f"{start} --max-num-seqs 16 --max-model-len 4096 --block-size 32 --x -1"
    assert (dict(found["graphs"].env), dict(found["base"].env)) == ({"A": "1", "B": "2"}, {"A": "1"})


def test_the_file_is_read_whole(tmp_path):
    experiment = read(tmp_path, WHOLE)
    assert (experiment.name, experiment.visits, experiment.gate is not None) == ("an experiment", 3, True)
    assert experiment.gate is not None and experiment.gate.settings.lengths == (2048,)
    work = experiment.workloads[0]
    assert work.job.wanted.slos == {"ttft": 200.0, "tpot": 50.0} and work.job.extra == {"ignore_eos": True}
    assert len(work.job.workload().asks) == 4


def test_visits_go_forth_and_back(tmp_path):
    experiment = read(tmp_path, WHOLE)
    wanted = configurations(experiment)
    order = [visit.configuration.label for visit in visits(experiment, wanted)]
    labels = [each.label for each in wanted]
    assert order == [*labels, *labels[::-1], *labels]
    assert [each.label for each in chosen(wanted, ("graphs",))] == ["base", "graphs", "more + graphs"]


def test_a_visit_is_known_by_what_it_measures(tmp_path):
    """Another gate or another step changes nothing about the base's visits; another workload does."""
    one = read(tmp_path, WHOLE)
    other = read(
        tmp_path, WHOLE.replace("levels = [0, 4]", "levels = [4]").replace("--block-size 32", "--block-size 64")
    )
    third = read(tmp_path, WHOLE.replace("isl = 1024", "isl = 2048"))
    bases = [identity(each, configurations(each)[0], 0) for each in (one, other, third)]
    assert bases[0] == bases[1] != bases[2]
    assert identity(one, configurations(one)[0], 1) != bases[0]
    assert identity(one, configurations(one)[1], 0) != identity(other, configurations(other)[1], 0)


def test_words_are_grouped_by_option():
    assert grouped(["--a", "1", "2", "-b", "--c=3", "-0.5"]) == (("--a", "1", "2"), ("-b",), ("--c", "3", "-0.5"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[run]\nvisits = 3", "[run]\nvisit = 3", "line 35: unknown key 'visit'; did you mean visits?"),
        ('[[step]]\nname = "graphs"', '[[step]]\nnmae = "graphs"', "line 13: unknown key 'nmae'; did you mean name?"),
        ('name = "both"', 'name = "more"', "line 18: two are called 'more'"),
        ('name = "both"', 'name = "a|b"', "line 18: each [[step]] has a name"),
        ('remove = ["--enforce-eager"]', 'remove = ["--eager"]', "line 14: the base has no --eager"),
        ("num_prompts = 4", "num_promts = 4", "line 24"),
        ("num_prompts = 4", "num_promts = 4", "did you mean --num-prompts?"),
        ("num_prompts = 4", "port = 4", "line 24: port is the experiment's own"),
        ("num_prompts = 4", "num_prompts = -4", "line 24"),
        ('dataset-name = "documents"', 'dataset-name = "document"', "line 23"),
        ('profile = "fp8-class"', 'profile = "fp8-clas"', "line 30"),
        ("levels = [0, 4]", "levels = [7]", "line 29: --levels"),
        ('lengths = ["2K"]', 'lengths = ["x"]', "line 29"),
        ("visits = 3", "visits = 0", "line 35: it is a whole number from 1"),
        ("visits = 3", "visits = true", "line 35"),
        ("visits = 3", "pause = 'soon'", "line 35: 'soon' is no time"),
        ("visits = 3", "metrics = ['speed']", "line 35: no metric 'speed'"),
        (" --port {port}", "", "line 4: the command does not say where"),
        ('command = "vllm', 'comand = "vllm', "line 4: unknown key 'comand'; did you mean command?"),
        ('command = "vllm', 'checkpoint = "no-such"\ncommand = "vllm', "line 4: command and checkpoint both"),
        ('options = ["--x", "-1"]', "options = [1]", "line 19: it is a text or a list of texts"),
        ('options = ["--x", "-1"]', "", "line 17: the step changes nothing"),
        ('env = {A = "1"}', "env = {A = []}", "line 6: it is a table of texts"),
        ("[gate]", "[gat]", "line 29: unknown key 'gat'; did you mean gate?"),
        ('options = "--max-num-seqs=16', "options = \"'--max-num-seqs=16", "line 10: cannot be split"),
        ("[base]", "[base", "is no TOML"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, old, new, said):
    assert old in WHOLE
    text = WHOLE.replace(old, new)
    with pytest.raises(ConfigError) as error:
        read(tmp_path, text)
    assert said in str(error.value), str(error.value)
    assert str(tmp_path / "x.toml") in str(error.value)


def test_a_file_that_is_none_is_refused(tmp_path):
    for text in (
        "",
        "x = 1\n",
        "[base]\n",
        "[base]\ncommand='a {port}'\n",
        "[base]\ncommand=''\n[[workload]]\nname='a'\n",
    ):
        with pytest.raises(ConfigError):
            read(tmp_path, text)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_experiment(tmp_path / "none.toml", job_of, locate)
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="no TOML"):
        read_experiment(tmp_path / "deep.toml", job_of, locate)
    (tmp_path / "large.toml").write_text("#" * (2**20 + 1))
    with pytest.raises(ConfigError, match="bytes"):
        read_experiment(tmp_path / "large.toml", job_of, locate)
