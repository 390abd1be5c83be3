"""Processor time of a server's processes, from outside."""

import psutil


class Spent:
    """Processor seconds of a process and its children."""

    def __init__(self, pid: int):
        server = psutil.Process(pid)
        self._processes = [server, *server.children(recursive=True)]

    def seconds(self) -> list[float]:
        times = [process.cpu_times() for process in self._processes]
        return [each.user + each.system for each in times]
