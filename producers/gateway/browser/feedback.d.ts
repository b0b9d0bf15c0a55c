/** Types of the script that the gateway serves at /v1/feedback.js. */

/** One piece of feedback. A comment is encrypted with its person's key, so it needs a subject. */
export interface RollwireFeedback {
  /** The answer that it is about, as the serving side gave it: "<group id>.<index>". */
  rollout_id: string;
  /** One of the gateway's rules: "thumb", "accept", "edit_survival", "rating", "comment", ... */
  signal: string;
  /** A number or a boolean, as the signal demands. */
  value?: number | boolean;
  /** A word instead, for signals that have words. */
  label?: string;
  comment?: string;
  /** The person, by an id of yours; the log has a pseudonym. */
  subject?: string;
  /** When it happened; by default now. */
  happened_at?: Date | string;
  /** The idempotency key; by default a new UUIDv7. Sent twice, it needs the same happened_at. */
  feedback_id?: string;
}

/** An event that the gateway refused for good. */
export interface RollwireRefused {
  feedback_id: string;
  /** Machine-readable: "unknown_signal", "value_out_of_range", ... */
  code: string;
  field?: string;
  detail?: string;
  event: RollwireFeedback;
}

export interface RollwireOptions {
  /** The gateway, as "https://feedback.example.com". */
  url: string;
  /** A publishable key: it lists the page's origin, and only writes. */
  key: string;
  /** Told of every event that is refused for good; by default the console is. */
  onRefused?: (refused: RollwireRefused) => void;
  /** How long the first event waits for company; by default 200. */
  lingerMs?: number;
}

export interface RollwireClient {
  /**
   * Takes an event and gives its id. It waits in localStorage until the gateway has it, over page loads too.
   * Throws TypeError without rollout_id or signal, RangeError where 500 events wait or this one is too large.
   */
  send(event: RollwireFeedback): string;
  /** The same as send, so that a page may push to an array before the script has loaded. */
  push(event: RollwireFeedback): string;
  /** Tries to send what waits now; whether nothing waits any more. */
  flush(): Promise<boolean>;
  /** How many events wait. */
  readonly pending: number;
  create(options: RollwireOptions): RollwireClient;
}

declare global {
  interface Window {
    /** A client where the script's element has data-key; an array before it has loaded. */
    rollwire: RollwireClient;
  }
}
