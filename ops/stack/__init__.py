"""The local stack: Apache Kafka, an S3 server and Redis on 127.0.0.1."""

from rollwire.ops.stack.config import StackConfig
from rollwire.ops.stack.info import SERVICES, ServiceName, ServiceProcess, StackInfo, read_stack
from rollwire.ops.stack.lifecycle import down, kill_service, log_file, restart_broker, running_stack, up

__all__ = [
    "SERVICES",
    "ServiceName",
    "ServiceProcess",
    "StackConfig",
    "StackInfo",
    "down",
    "kill_service",
    "log_file",
    "read_stack",
    "restart_broker",
    "running_stack",
    "up",
]
