"""Every error that Rollwire raises, in one tree.

    RollwireError
    ├── ConfigError                 a setting is wrong; exit code 2
    ├── EnvironmentMissing          a program, package, port or disk that is needed is not there; exit code 2
    ├── StackError                  the local stack did not start, or did not stop; exit code 2
    ├── TopicMismatch               a topic on the broker differs from its declaration; exit code 2
    ├── Refused                     one event is bad; it goes to `dead-letters` with a reason, others go on
    ├── LogError                    the broker
    │   ├── LogUnavailable          did not answer in time (recoverable: try again with a new client)
    │   ├── TransactionUnknown      the outcome of a transaction is not known: destroy the producer (law 4)
    │   ├── Fenced                  another process took over this transactional id: stop
    │   ├── OffsetLost              a committed offset is no longer in the log (law 3: never skip ahead)
    │   └── SplitPair               a worker holds one half of a co-partitioned pair
    ├── CircuitOpen                 a processor refuses so much that it halts before it drains its topic
    ├── RegistryError               the schema registry refused a request (another schema under the subject, say)
    │   └── RegistryUnavailable     did not answer in time (recoverable: nothing was refused or lost)
    ├── StoreError                  the object store
    │   ├── StoreUnavailable        did not answer in time (recoverable)
    │   ├── ObjectMissing           no such key
    │   ├── ObjectConflict          the key exists with other content
    │   └── StoreUnfit              the store ignores the conditions that law 3 needs; exit code 2
    ├── WeightError                 weights
    │   ├── DeltaCorrupt            the bytes of a delta or a shard are damaged
    │   ├── BaseMismatch            a delta is for another base than the one held
    │   ├── StateMismatch           tensors are missing, extra, or of another shape or dtype
    │   ├── DigestMismatch          the resulting state is not the published one
    │   ├── FormatUnknown           an object of a format that this release does not read (a newer one's: upgrade)
    │   ├── TargetFailed            what serves did not take a version (an engine's answer, a full disk): the one before serves
    │   └── ProbeFailed             what is served after a swap is not what was published: it was undone
    ├── EngineError                 the HTTP server of an inference engine
    │   ├── EngineUnavailable       did not answer in time, or closed the connection (recoverable: ask again)
    │   └── EngineRefused           answered that it will not, or something that this software does not understand
    ├── SealError                   content that is encrypted per person
    │   ├── Erased                  the person's key was destroyed on request: the content is gone, and that is no fault
    │   ├── SealInvalid             ciphertext, tag, key and place do not belong to one another
    │   └── KeyMissing              neither the key nor the mark of its destruction is there: another key store, or a loss
    ├── FeedbackError               feedback on its way to the gateway
    │   ├── SpoolFull               what waits reached its bound, or the disk is full: nothing was taken, nothing dropped
    │   └── GatewayRefused          the gateway turns every request away (key, address): what waits is kept
    ├── AuditError                  the sealed history of a run
    │   ├── ArchiveCorrupt          an archived object does not read
    │   ├── HeadInvalid             a sealed head does not read, or is not what its place says
    │   ├── SignatureInvalid        a sealed head's signature does not verify
    │   ├── KeyUnknown              a sealed head is signed by a key that is not trusted
    │   └── ProofInvalid            a proof does not prove what it says, or none can be made
    ├── PlanViolation               a step plan breaks a law (lag, order, budget): the trainer halts
    ├── RankLost                    a process of the trainer died or did not answer in time
    ├── MismatchDrift               trainer and sampler drift apart, and the trainer was told to pause then; exit code 3
    ├── ReplayDiverged              a replayed step gave other bits than the published ones
    └── DeadlineExceeded            a wait ended at its deadline (law 8)

Each message says what happened, where (topic, partition, offset, tensor, object key) and what to do.
"""

from __future__ import annotations


class RollwireError(Exception):
    """Base of all errors of ours. `exit_code` is what a command ends with."""

    exit_code = 1


class ConfigError(RollwireError):
    exit_code = 2


class EnvironmentMissing(RollwireError):
    exit_code = 2


class StackError(RollwireError):
    exit_code = 2


class TopicMismatch(RollwireError):
    exit_code = 2


class Refused(RollwireError):
    """One event is refused. `reason` is a member of `rollwire.schemas.reasons.Reason`; `detail` is for people; `field` is
    the one that is wrong, where it is one ("" = not said)."""

    def __init__(self, reason: str, detail: str, field: str = "") -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.field = field


class LogError(RollwireError):
    pass


class LogUnavailable(LogError):
    pass


class TransactionUnknown(LogError):
    pass


class Fenced(LogError):
    pass


class OffsetLost(LogError):
    pass


class SplitPair(LogError):
    pass


class CircuitOpen(RollwireError):
    pass


class RegistryError(RollwireError):
    pass


class RegistryUnavailable(RegistryError):
    pass


class StoreError(RollwireError):
    pass


class StoreUnavailable(StoreError):
    pass


class ObjectMissing(StoreError):
    pass


class ObjectConflict(StoreError):
    pass


class StoreUnfit(StoreError):
    exit_code = 2


class WeightError(RollwireError):
    pass


class DeltaCorrupt(WeightError):
    pass


class BaseMismatch(WeightError):
    pass


class StateMismatch(WeightError):
    pass


class DigestMismatch(WeightError):
    pass


class FormatUnknown(WeightError):
    pass


class TargetFailed(WeightError):
    pass


class ProbeFailed(WeightError):
    pass


class EngineError(RollwireError):
    pass


class EngineUnavailable(EngineError):
    pass


class EngineRefused(EngineError):
    pass


class SealError(RollwireError):
    pass


class Erased(SealError):
    pass


class SealInvalid(SealError):
    pass


class KeyMissing(SealError):
    pass


class FeedbackError(RollwireError):
    pass


class SpoolFull(FeedbackError):
    pass


class GatewayRefused(FeedbackError):
    pass


class AuditError(RollwireError):
    pass


class ArchiveCorrupt(AuditError):
    """`key` names the object in the store, where it is one."""

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class HeadInvalid(AuditError):
    pass


class SignatureInvalid(AuditError):
    pass


class KeyUnknown(AuditError):
    pass


class ProofInvalid(AuditError):
    pass


class PlanViolation(RollwireError):
    pass


class RankLost(RollwireError):
    pass


class MismatchDrift(RollwireError):
    exit_code = 3


class ReplayDiverged(RollwireError):
    pass


class DeadlineExceeded(RollwireError):
    pass
