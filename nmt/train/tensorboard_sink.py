"""Shows a run in TensorBoard: RUN/tensorboard has one file of events.

It is written anew whenever somebody begins to follow the run, so a run that went back to a
checkpoint leaves no stale points. Events are written with TensorBoard's own writer, without torch.
"""

import re
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from nmt.system.files import check_own_folder, make_folder, open_plain_file, read_bytes
from nmt.system.run_folder import RunFolder
from nmt.train.sinks import SAMPLE_TEXTS, name_figures

MARKDOWN_SIGN = re.compile(r"[^\w\s]|_")


class TensorBoardSink:
    def __init__(self, path: Path) -> None:
        run = RunFolder(path)
        check_own_folder(run.tensorboard, inside=path)
        make_folder(run.tensorboard)
        # A TensorBoard that is looking finds another file by a name that is greater.
        numbers = [0]
        for old in run.tensorboard.glob("events.out.tfevents.*.nmt"):
            number = old.name.split(".")[3]
            numbers.append(int(number) if number.isdecimal() else 0)
            old.unlink()
        name = f"events.out.tfevents.{max(numbers) + 1:010d}.nmt"
        self.file = open_plain_file(run.tensorboard / name, "wb")
        self.writer = RecordWriter(self.file)

        # Metrics have the seconds since the run began.
        self.started_at = run.config.stat().st_mtime
        self.elapsed_s = 0.0
        self._add(0, file_version="brain.Event:2")
        # makes a TensorBoard that has read an earlier file forget it
        self._add(0, session_log=SessionLog(status=SessionLog.START))
        settings = read_bytes(run.config).decode(errors="replace")
        code = "".join(f"    {line}\n" for line in settings.splitlines())
        self._add(0, summary=text_pb("config", code))

    def write(self, line: dict[str, Any]) -> None:
        step, figures = line["step"], name_figures(line)
        elapsed_s = line.get("elapsed_s")
        if isinstance(elapsed_s, int | float):
            self.elapsed_s = float(elapsed_s)
        if line["kind"] == "sample":
            self._add_sample(line)
        elif figures:
            values = [Summary.Value(tag=tag, simple_value=x) for tag, x in figures.items()]
            self._add(step, summary=Summary(value=values))
        self.file.flush()

    def close(self) -> None:
        self.file.close()

    def _add_sample(self, line: dict[str, Any]) -> None:
        step, tag = line["step"], f"line {line.get('line')}"
        parts = [f"**{key}** {_escape(line.get(key))}" for key in SAMPLE_TEXTS]
        self._add(step, summary=text_pb(f"sample/{tag}", "\n\n".join(parts)))

    def _add(
        self,
        step: int,
        summary: Summary | None = None,
        session_log: SessionLog | None = None,
        file_version: str | None = None,
    ) -> None:
        event = Event(
            wall_time=self.started_at + self.elapsed_s,
            step=step,
            summary=summary,
            session_log=session_log,
            file_version=file_version,
        )
        self.writer.write(event.SerializeToString())


def _escape(text: Any) -> str:
    """Write text so that Markdown shows it as it is."""
    return MARKDOWN_SIGN.sub(lambda found: f"&#{ord(found[0])};", str(text))
