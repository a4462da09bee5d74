//! Queue of log lines, written to stderr by a separate thread, so that a slow terminal, pipe or disk delays no other
//! thread.
//!
//! The queue is bounded. Excess lines are dropped and counted. So are repetitions: more than [`REPEATS_MAX`] lines per
//! second from one call site. Both counts are logged when there is room. [`flush`] waits for the queued lines, at the
//! end of the process and on a panic.
//!
//! Not a library's writer: it would lose the last lines, because threads that end with the process drop nothing.

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Context, Filter};

/// Maximum number of queued lines.
const LINES_MAX: usize = 8192;

/// Maximum number of lines per second from one call site.
const REPEATS_MAX: u32 = 50;

/// Maximum duration of [`flush`].
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Minimum interval between log lines about omitted lines.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Target of audit lines, which are never omitted: a search for misuse needs all of them, and causing them takes
/// permissions. Lines with the field [`REFUSED`] are the exception.
const AUDIT_TARGET: &str = "audit";

/// Field of lines about refused requests. A client without permissions can cause them at any rate.
const REFUSED: &str = "refused";

static QUEUE: OnceLock<LogQueue> = OnceLock::new();

enum Message {
    Line(Vec<u8>),
    /// Answered when all preceding lines are written.
    Flush(SyncSender<()>),
}

#[derive(Debug, Default)]
struct Left {
    dropped: AtomicU64,
    repeated: AtomicU64,
}

/// Handle for adding lines.
#[derive(Clone, Debug)]
pub(super) struct LogQueue {
    sender: SyncSender<Message>,
    left: Arc<Left>,
    /// Field at the end of every line: the pools of one configuration share a log.
    field: Option<Arc<Field>>,
}

/// A formatted field, and the end of line before which it is inserted.
#[derive(Debug)]
struct Field {
    text: String,
    before: &'static str,
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Message::Line(_) => "Line",
            Message::Flush(_) => "Flush",
        })
    }
}

impl LogQueue {
    /// Returns the queue of this process, which writes to stderr.
    pub(super) fn for_process() -> io::Result<Self> {
        let queue = Self::to(io::stderr(), LINES_MAX)?;
        Ok(QUEUE.get_or_init(|| queue).clone())
    }

    fn to(sink: impl Write + Send + 'static, lines_max: usize) -> io::Result<Self> {
        let (sender, receiver) = sync_channel(lines_max);
        let left = Arc::<Left>::default();
        let of_writer = left.clone();
        std::thread::Builder::new().name("log".into()).spawn(move || write_lines(sink, &receiver, &of_writer))?;
        Ok(Self { sender, left, field: None })
    }

    /// Appends this field to every line of text.
    pub(super) fn with_field(self, name: &str, value: &str) -> Self {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let value =
            if !value.is_empty() && value.bytes().all(is_plain) { value.to_owned() } else { format!("{value:?}") };
        self.ending(format!(" {name}={value}"), "\n")
    }

    /// Adds this field to every line of JSON.
    pub(super) fn with_json_field(self, name: &str, value: &str) -> Self {
        self.ending(format!(",{}:{}", serde_json::Value::from(name), serde_json::Value::from(value)), "}\n")
    }

    fn ending(self, text: String, before: &'static str) -> Self {
        Self { field: Some(Arc::new(Field { text, before })), ..self }
    }

    /// Returns a filter that limits repetitions to [`REPEATS_MAX`] per second.
    pub(super) fn without_repeats(&self) -> WithoutRepeats {
        WithoutRepeats { left: self.left.clone(), began: Instant::now(), recent: Mutex::default() }
    }

    fn flush(&self, timeout: Duration) {
        let until = Instant::now() + timeout;
        let (done, is_done) = sync_channel(1);
        let mut message = Message::Flush(done);
        // The queue may be full because stderr blocks.
        while let Err(error) = self.sender.try_send(message) {
            let std::sync::mpsc::TrySendError::Full(back) = error else { return };
            if Instant::now() >= until {
                return;
            }
            message = back;
            std::thread::sleep(Duration::from_millis(1));
        }
        // If stderr blocks, the lines are lost.
        let _ = is_done.recv_timeout(until.saturating_duration_since(Instant::now()));
    }
}

/// Waits until the queued lines are written, at most [`FLUSH_TIMEOUT`].
pub(crate) fn flush() {
    if let Some(queue) = QUEUE.get() {
        queue.flush(FLUSH_TIMEOUT);
    }
}

/// Number of lines dropped because the queue was full, and number of omitted repetitions.
pub(super) fn omitted_counts() -> (u64, u64) {
    QUEUE.get().map_or((0, 0), |queue| {
        (queue.left.dropped.load(Ordering::Relaxed), queue.left.repeated.load(Ordering::Relaxed))
    })
}

fn write_lines(mut sink: impl Write, receiver: &Receiver<Message>, left: &Left) {
    let (mut told, mut next) = ((0, 0), Instant::now());
    loop {
        match receiver.recv_timeout(REPORT_INTERVAL) {
            // A failure to write the log cannot be logged.
            Ok(Message::Line(line)) => {
                let _ = sink.write_all(&line);
            }
            Ok(Message::Flush(done)) => {
                let _ = sink.flush();
                // The caller may have timed out.
                let _ = done.send(());
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let now = (left.dropped.load(Ordering::Relaxed), left.repeated.load(Ordering::Relaxed));
        if now != told && Instant::now() >= next {
            next = Instant::now() + REPORT_INTERVAL;
            let (dropped, repeated) = (now.0 - told.0, now.1 - told.1);
            tracing::warn!(
                dropped,
                repeated,
                "log lines were suppressed: too many at once, or too many of one kind in a second"
            );
            told = now;
        }
    }
}

impl<'a> MakeWriter<'a> for LogQueue {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { queue: self, bytes: Vec::new() }
    }
}

/// A line being written. Queued on drop.
#[derive(Debug)]
pub(super) struct Line<'a> {
    queue: &'a LogQueue,
    bytes: Vec<u8>,
}

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Line<'_> {
    fn drop(&mut self) {
        if let Some(Field { text, before }) = self.queue.field.as_deref()
            && let Some(end) = self.bytes.len().checked_sub(before.len())
            && self.bytes.ends_with(before.as_bytes())
        {
            self.bytes.splice(end..end, text.bytes());
        }
        if !self.bytes.is_empty() && self.queue.sender.try_send(Message::Line(std::mem::take(&mut self.bytes))).is_err()
        {
            self.queue.left.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// See [`LogQueue::without_repeats`].
#[derive(Debug)]
pub(super) struct WithoutRepeats {
    left: Arc<Left>,
    began: Instant,
    /// By call site: the current second, and the number of lines in it.
    recent: Mutex<HashMap<Identifier, (u64, u32)>>,
}

impl WithoutRepeats {
    fn passes(&self, of: &Metadata<'_>, second: u64) -> bool {
        if *of.level() > Level::INFO || (of.target() == AUDIT_TARGET && of.fields().field(REFUSED).is_none()) {
            return true;
        }
        let mut lately = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, count) = lately.entry(of.callsite()).or_default();
        if *at != second {
            (*at, *count) = (second, 0);
        }
        *count += 1;
        let passes = *count <= REPEATS_MAX;
        if !passes {
            self.left.repeated.fetch_add(1, Ordering::Relaxed);
        }
        passes
    }
}

impl<S: Subscriber> Filter<S> for WithoutRepeats {
    fn enabled(&self, _: &Metadata<'_>, _: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _: &Context<'_, S>) -> bool {
        self.passes(event.metadata(), self.began.elapsed().as_secs())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Condvar;

    use super::*;

    /// A sink that blocks until it is opened.
    #[derive(Clone, Default)]
    struct Gate(Arc<(Mutex<Taken>, Condvar)>);

    /// Whether the gate is open, and the bytes written to it.
    type Taken = (bool, Vec<u8>);

    impl Gate {
        fn open(&self) {
            self.0.0.lock().expect("no panic").0 = true;
            self.0.1.notify_all();
        }

        fn lines(&self) -> Vec<String> {
            let bytes = self.0.0.lock().expect("no panic").1.clone();
            String::from_utf8(bytes).expect("text").lines().map(str::to_owned).collect()
        }
    }

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut state =
                self.0.1.wait_while(self.0.0.lock().expect("no panic"), |(open, _)| !*open).expect("no panic");
            state.1.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_of_a_pool_end_with_its_name() {
        let shown = |with: fn(LogQueue) -> LogQueue, line: &str| {
            let gate = Gate::default();
            gate.open();
            let queue = with(LogQueue::to(gate.clone(), 10).expect("a thread"));
            writeln!(queue.make_writer(), "{line}").expect("queued");
            queue.flush(Duration::from_secs(60));
            gate.lines()
        };
        assert_eq!(
            shown(|queue| queue.with_field("pool", "alpha"), "INFO move 2 is done"),
            ["INFO move 2 is done pool=alpha"]
        );
        assert_eq!(shown(|queue| queue.with_field("pool", "a b"), "INFO x"), ["INFO x pool=\"a b\""]);
        let json = shown(|queue| queue.with_json_field("pool", "a \"b\""), r#"{"level":"INFO","message":"x"}"#);
        assert_eq!(json, [r#"{"level":"INFO","message":"x","pool":"a \"b\""}"#]);
    }

    #[test]
    fn a_blocked_log_delays_no_thread_and_lost_lines_are_counted() {
        let gate = Gate::default();
        let queue = LogQueue::to(gate.clone(), 10).expect("a thread");
        for number in 0..100 {
            writeln!(queue.make_writer(), "line {number}").expect("it is only queued");
        }
        queue.flush(Duration::ZERO);
        let dropped = queue.left.dropped.load(Ordering::Relaxed) as usize;
        // The writer may already have removed one line from the queue.
        assert!((89..=90).contains(&dropped), "{dropped}");
        gate.open();
        queue.flush(Duration::from_secs(60));
        let lines = gate.lines();
        assert_eq!(lines.len() + dropped, 100);
        assert_eq!(lines[..9], std::array::from_fn::<_, 9, _>(|number| format!("line {number}")));
        writeln!(queue.make_writer(), "the last").expect("it is only queued");
        queue.flush(Duration::from_secs(60));
        assert_eq!(
            gate.lines().last().map(String::as_str),
            Some("the last"),
            "a flush waits for the lines queued before it"
        );
    }

    #[test]
    fn lines_from_one_call_site_are_limited_per_second() {
        use tracing_subscriber::layer::{Layer, SubscriberExt};

        let gate = Gate::default();
        gate.open();
        let queue = LogQueue::to(gate.clone(), 10_000).expect("a thread");
        let lines = tracing_subscriber::fmt::layer().with_writer(queue.clone()).with_filter(queue.without_repeats());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), || {
            for number in 0..1000 {
                tracing::warn!(number, "repeated");
                tracing::warn!(target: "audit", number, "never left out");
                tracing::warn!(target: "audit", number, refused = true, "without a right");
            }
            tracing::warn!("another");
        });
        queue.flush(Duration::from_secs(60));
        let lines = gate.lines();
        let count = |what: &str| lines.iter().filter(|line| line.contains(what)).count();
        // The lines may span two seconds.
        assert!((REPEATS_MAX as usize..1000).contains(&count("repeated")), "{}", count("repeated"));
        assert!((REPEATS_MAX as usize..1000).contains(&count("without a right")), "{}", count("without a right"));
        let both = count("repeated") + count("without a right");
        assert_eq!(both as u64 + queue.left.repeated.load(Ordering::Relaxed), 2000);
        assert_eq!((count("never left out"), count("another")), (1000, 1));
    }
}
