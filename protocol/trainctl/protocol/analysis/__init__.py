"""Pure analysis of a run's curves: rolling statistics and detectors of spikes, divergence, plateaus and slowdowns,
shared by agent, policies and screens.

`CurveJudge` takes the committed steps in order and holds what they show: alerts, policies and diagnosis read it. It has
a `SpikeDetector` and a `DivergenceDetector`. `PlateauDetector` takes the evaluations, `SlowdownDetector` a rank's
durations. `RollingStatistics` describes a window of steps, `StragglerWatch` names the rank that the others wait for.
"""
