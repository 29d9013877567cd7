"""The name that 0.1.0 had for `trainctl.protocol.security.keys`."""

from trainctl.protocol import moved
from trainctl.protocol.security.keys import *

moved.warn(__name__, "trainctl.protocol.security.keys")
