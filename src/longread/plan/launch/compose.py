"""A launch as a Docker Compose file: one service a process, GPUs reserved, weights and compiled kernels on volumes."""

import json
from collections.abc import Iterable

from longread.plan.launch.command import WEIGHTS, Launch, Options, Process, Variable, cache_folder
from longread.plan.launch.shell import comment, header
from longread.spec.errors import ConfigError
from longread.spec.hardware import GIB

_IMAGES = {"vllm": "vllm/vllm-openai:v{version}", "sglang": "lmsysorg/sglang:v{version}"}
_SHARED_GIB = 32  # /dev/shm for NCCL and the engine's broadcast rings; Docker's 64 MiB stop both


def compose(launch: Launch, options: Options) -> str:
    """Services of one node start without a profile; of several, under the profile of their node.

    Raises ``ConfigError`` for longread, which publishes no image.
    """
    if launch.engine not in _IMAGES:
        raise ConfigError("no image of longread is published; emit systemd, or longread for the plain command")
    several = launch.nodes > 1
    lines = header(launch)
    lines += comment("Host driver: NVIDIA Container Toolkit. Weights are read from the folder in volumes, offline.", "")
    if several:
        lines.append("# On node N: docker compose --profile nodeN up -d")
    lines += ["services:"]
    for p in launch.processes:
        lines += _service(launch, options, p, several)
    return "\n".join(lines) + "\n"


def _service(launch: Launch, options: Options, p: Process, several: bool) -> list[str]:
    name = f"{launch.engine}-{p.replica}" + (f"-{p.part}" if several else "")
    lines = [f"  {name}:", f"    image: {_IMAGES[launch.engine].format(version=launch.version)}"]
    lines += [f"    profiles: [node{p.node}]"] if several else []
    lines += [*comment("one network with the host: no port mapping, and NCCL sees the real interfaces", "    ")]
    lines += ["    network_mode: host", "    restart: unless-stopped"]
    why = "NCCL and the engine's processes talk over shared memory; Docker's default of 64 MiB stops them at start"
    lines += [*comment(why, "    "), f"    shm_size: {_SHARED_GIB}gb"]
    lines += ["    ulimits:"]
    host = f" (here {launch.host_bytes / GIB:.0f} GiB of host cache)" if launch.host_bytes else ""
    lines += [*comment(f"pinned host memory{host} and RDMA buffers are locked", "      "), "      memlock: -1"]
    lines += [*comment("NCCL's threads need it", "      "), "      stack: 67108864"]
    lines += [*comment("a socket a client and files of all shards", "      "), "      nofile: 1048576"]
    lines += _devices(p)
    lines += ["    volumes:", *comment("the hub's cache, or a folder of checkpoints", "      ")]
    lines += _mount(_weights(options), read_only=True)
    lines += comment("compiled kernels: without it each start compiles anew", "      ")
    lines += _mount(cache_folder(launch.engine))
    lines += _environment(launch, options, p)
    lines += _health(p)
    lines += ["    entrypoint:", *(f"      - {json.dumps(word)}" for word in launch.program)]
    lines += ["    command:"]
    for flag in (*launch.flags, *p.flags):
        lines += [*comment(flag.why, "      "), *(f"      - {_scalar(word)}" for word in flag.words)]
    return lines


def _weights(options: Options) -> str:
    """The folder on the host; a checkpoint that is given by its path is seen under the same path inside."""
    return options.model if options.model is not None and options.model.startswith("/") else WEIGHTS


def _mount(folder: str, read_only: bool = False) -> list[str]:
    """The long form: colons in a path mean nothing there."""
    quoted = _scalar(folder)
    lines = ["      - type: bind", f"        source: {quoted}", f"        target: {quoted}"]
    return lines + (["        read_only: true"] if read_only else ["        bind:", "          create_host_path: true"])


def _devices(p: Process) -> list[str]:
    chosen = [v for v in p.variables if v.name == "CUDA_VISIBLE_DEVICES"]
    ids = f"device_ids: {json.dumps(chosen[0].value.split(','))}" if chosen else "count: all"
    why = chosen[0].why if chosen else "every GPU of the node belongs to this replica"
    lines = ["    deploy:", "      resources:", "        reservations:", "          devices:"]
    lines += ["            - driver: nvidia", *comment(why, "              ")]
    return [*lines, f"              {ids}", "              capabilities: [gpu]"]


def _environment(launch: Launch, options: Options, p: Process) -> list[str]:
    offline = Variable("HF_HUB_OFFLINE", "1", "weights are there; nothing is looked up elsewhere")
    home = Variable("HF_HOME", WEIGHTS, "where a repository's name is looked up")
    lines = ["    environment:"]
    # Docker gives the container its cards under new numbers, so CUDA_VISIBLE_DEVICES would choose among those.
    own: Iterable[Variable] = (v for v in p.variables if v.name != "CUDA_VISIBLE_DEVICES")
    for v in (*launch.variables, *own, home, offline):
        lines += [*comment(v.why, "      "), f"      {v.name}: {_scalar(v.value)}"]
    return lines


def _health(p: Process) -> list[str]:
    if p.part > 0:
        return []  # answers no HTTP
    test = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{p.port}/health', timeout=5)"
    lines = ["    healthcheck:", f"      test: {json.dumps(['CMD', 'python3', '-c', test])}"]
    lines += ["      interval: 10s", "      timeout: 6s", "      retries: 3"]
    return [
        *lines,
        *comment("loading and compiling: failures before that do not count", "      "),
        "      start_period: 1h",
    ]


def _scalar(word: str) -> str:
    """A YAML string in double quotes, with Compose's own $ doubled."""
    return json.dumps(word.replace("$", "$$"))
