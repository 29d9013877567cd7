"""The name that 0.1.0 had for `trainctl.protocol.messages.verbs`."""

from trainctl.protocol import moved
from trainctl.protocol.messages.verbs import *

moved.warn(__name__, "trainctl.protocol.messages.verbs")
