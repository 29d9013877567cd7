"""The name that 0.1.0 had for `trainctl.protocol.client`."""

from trainctl.protocol import moved
from trainctl.protocol.client.cluster import *

moved.warn(__name__, "trainctl.protocol.client")
