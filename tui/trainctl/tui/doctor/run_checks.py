"""All that the doctor finds in a scene, in the order in which it is reported."""

from trainctl.tui.doctor.check_cluster import of_alert_hooks, of_clock, of_interfaces, of_jaccl, of_reach, of_versions
from trainctl.tui.doctor.check_files import of_disks, of_files
from trainctl.tui.doctor.check_machine import of_compile, of_environment, of_machine
from trainctl.tui.doctor.findings import ClusterFacts, Finding, Look

HERE, NO_AGENT = "this machine", "ipc:///-"


def findings(scene: ClusterFacts) -> tuple[Finding, ...]:
    """Node by node, then of all together."""
    found: list[Finding] = []
    for look in scene.looks:
        found += of_reach(look, scene.here)
        if look.facts is not None:
            found += of_machine(look, look.facts)
            found += of_compile(look, look.facts, scene.run)
            found += of_clock(look)
            found += of_alert_hooks(look)
            found += of_interfaces(look, look.facts, scene)
            found += of_environment(look, look.facts)
    if not any(look.is_here for look in scene.looks):  # it may be a node whose agent doesn't run, or none
        here = Look(HERE, NO_AGENT)
        found += [*of_machine(here, scene.here), *of_environment(here, scene.here)]
    return (*found, *of_versions(scene), *of_jaccl(scene), *of_disks(scene), *of_files(scene))


def line(finding: Finding) -> str:
    """As it is printed after its level."""
    where = f"{finding.node}: " if finding.node else ""
    do = f" → {finding.do}" if finding.do else ""
    return f"{where}{finding.subject}: {finding.text}{do}"
