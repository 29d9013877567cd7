"""The name that 0.1.0 had for `trainctl.protocol.security.keyring`."""

from trainctl.protocol import moved
from trainctl.protocol.security.keyring import *

moved.warn(__name__, "trainctl.protocol.security.keyring")
