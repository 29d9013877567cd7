"""A diagnosis of a run by its record alone, on any machine."""

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnose import diagnose
from trainctl.protocol.analysis.diagnosis.record_facts import config_of, facts_of_record
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader


def of_record(paths: RunPaths, last_step: int | None = None) -> m.Diagnosis:
    """As the run was at its end, or at `last_step`. Raises InvalidInputError if the record cannot be read."""
    with RecordReader(paths) as reader:
        return diagnose(facts_of_record(reader, config_of(paths), last_step=last_step))
