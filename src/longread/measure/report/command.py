"""The commands: files in, a table or a page out, an exit code. How either is made is others'."""

from collections.abc import Sequence
from pathlib import Path

from longread.measure.files import appearing, write_json
from longread.measure.report import compare_table, page, png
from longread.measure.report.compare import Wanted
from longread.measure.report.compare import compare as compared
from longread.measure.report.files import read_all, read_runs
from longread.measure.report.gates import gate_for
from longread.spec.errors import ConfigError

WORSE, OPEN = 1, 3  # exit codes, as the gate's FAIL and INCONCLUSIVE


def compare(a: Path, b: Path, gates: Sequence[Path], wanted: Wanted, output: Path | None, fail_on: str | None) -> int:
    """Show A against B. 0; with ``fail_on`` "worse" 1 where a row is worse, with "inconclusive" 3 where one is open.

    Raises ConfigError where a file is not usable, or the two must not be compared.
    """
    if a.resolve() == b.resolve() and not wanted.anyway:
        raise ConfigError(
            f"{a} and {b} are the same file: there is nothing to compare; give --anyway to do it all the same"
        )
    sides = read_runs(a), read_runs(b)
    more = read_all(gates).gates
    for run in (*sides[0], *sides[1]):
        run.gate = gate_for(run, [*([run.gate] if run.gate is not None else []), *more])
    found = compared(*sides, wanted)
    if output is not None:
        write_json(output, found.document())
    compare_table.show(found)
    if output is not None:
        print(f"written: {output}")
    verdicts = {row.verdict for row in found.rows}
    if fail_on is not None and "worse" in verdicts:
        return WORSE
    return OPEN if fail_on == "inconclusive" and "inconclusive" in verdicts else 0


def report(files: Sequence[Path], output: Path, png_folder: Path | None, title: str | None) -> int:
    """Write the page and the plots. Raises ConfigError where a file is not usable."""
    if png_folder is not None:
        png.check()
    found = read_all(files)
    made = page.render(found, title)
    with appearing(output) as out:
        out.write(made.html)
    print(f"written: {output} ({len(found.all_runs):,} runs, {len(found.gates):,} gates, {len(found.plans):,} plans)")
    if png_folder is not None:
        written = png.write(png_folder, made.pictures)
        print(f"written: {len(written):,} plots in {png_folder}")
    return 0
