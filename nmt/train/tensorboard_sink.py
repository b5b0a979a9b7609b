"""Shows a run in TensorBoard: RUN/tensorboard has one file of events.

It is written anew whenever training or nmt-track starts, so a run that went back to a
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
        # An open TensorBoard takes up another file only if its name is greater. A clock can go back.
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
        self._add(Event(file_version="brain.Event:2"))
        # makes a TensorBoard that has read an earlier file forget it
        self._add(Event(session_log=SessionLog(status=SessionLog.START)))
        settings = read_bytes(run.config).decode(errors="replace")
        code = "".join(f"    {line}\n" for line in settings.splitlines())
        self._add(Event(summary=text_pb("config", code)))

    def write(self, line: dict[str, Any]) -> None:
        elapsed_s = line.get("elapsed_s")
        if isinstance(elapsed_s, int | float):
            self.elapsed_s = float(elapsed_s)
        if line["kind"] == "sample":
            parts = [f"**{key}** {_escape(line.get(key))}" for key in SAMPLE_TEXTS]
            summary = text_pb(f"sample/line {line.get('line')}", "\n\n".join(parts))
        else:
            figures = name_figures(line).items()
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=x) for tag, x in figures])
        self._add(Event(step=line["step"], summary=summary))
        self.file.flush()

    def close(self) -> None:
        self.file.close()

    def _add(self, event: Event) -> None:
        event.wall_time = self.started_at + self.elapsed_s
        self.writer.write(event.SerializeToString())


def _escape(text: Any) -> str:
    """Escape text so that Markdown shows it literally."""
    return MARKDOWN_SIGN.sub(lambda found: f"&#{ord(found[0])};", str(text))
