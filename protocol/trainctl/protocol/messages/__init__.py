"""All messages, as one closed union, with each field's unit or meaning.

Three conversations share it: a client and an agent (requests, replies, live messages), an agent and a trainer (orders
down, answers up), and the lead's agent and a follower's (the same, relayed). Times named `*_at` are Unix seconds; every
other duration is in seconds by a monotonic clock.
"""

from trainctl.protocol.messages.base import *
from trainctl.protocol.messages.diagnosis import *
from trainctl.protocol.messages.kept import *
from trainctl.protocol.messages.metrics import *
from trainctl.protocol.messages.peers import *
from trainctl.protocol.messages.replies import *
from trainctl.protocol.messages.requests import *
from trainctl.protocol.messages.telemetry import *
from trainctl.protocol.messages.trainer import *
