//! Log lines on their way to stderr: handed to a thread that writes them, so that nobody waits for a terminal, a pipe
//! or a disk that takes them slowly.
//!
//! The queue has a bound. Lines beyond it are dropped and counted, and so are repeated ones: more than [`REPEATS_MAX`]
//! a second from one place in the code. Both are said in the log as soon as there is room. [`flush`] waits for what is
//! queued, at the end of the process and at a panic.
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

/// Lines that may wait.
const LINES_MAX: usize = 8192;

/// Lines a second from one place in the code.
const REPEATS_MAX: u32 = 50;

/// How long [`flush`] waits for somebody to take the lines.
const FLUSH_PATIENCE: Duration = Duration::from_secs(1);

/// What was left out is said so often at most.
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Those who look for misuse read all of these, and they cannot be caused without a right; but for those with the field
/// [`REFUSED`].
const NEVER_LEFT_OUT: &str = "audit";

/// A line that somebody causes who has no right to what is asked for, so as often as he likes.
const REFUSED: &str = "refused";

/// The queue of this process.
static QUEUE: OnceLock<LogQueue> = OnceLock::new();

enum Message {
    Line(Vec<u8>),
    /// To be answered when all lines before it are written.
    Flush(SyncSender<()>),
}

#[derive(Debug, Default)]
struct Left {
    dropped: AtomicU64,
    repeated: AtomicU64,
}

/// Where lines are put.
#[derive(Clone, Debug)]
pub(super) struct LogQueue {
    sender: SyncSender<Message>,
    left: Arc<Left>,
    /// The field at the end of every line: pools of one configuration share a log.
    field: Option<Arc<Field>>,
}

/// A field as its format writes it, and the end of a line that it stands before.
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
    /// The queue of this process, to stderr.
    pub(super) fn of_process() -> io::Result<Self> {
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

    /// Ends every line of text with this field.
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

    /// Lets no line through that has been said often in this second.
    pub(super) fn without_repeats(&self) -> WithoutRepeats {
        WithoutRepeats { left: self.left.clone(), began: Instant::now(), lately: Mutex::default() }
    }

    fn flush(&self, patience: Duration) {
        let until = Instant::now() + patience;
        let (done, is_done) = sync_channel(1);
        let mut message = Message::Flush(done);
        // The queue may be full of lines that nobody takes.
        while let Err(error) = self.sender.try_send(message) {
            let std::sync::mpsc::TrySendError::Full(back) = error else { return };
            if Instant::now() >= until {
                return;
            }
            message = back;
            std::thread::sleep(Duration::from_millis(1));
        }
        // Whoever takes no lines gets none.
        let _ = is_done.recv_timeout(until.saturating_duration_since(Instant::now()));
    }
}

/// Waits until the lines of this process are written, but not for ever.
pub(crate) fn flush() {
    if let Some(queue) = QUEUE.get() {
        queue.flush(FLUSH_PATIENCE);
    }
}

/// How many lines were dropped because too many waited, and how many were left out as repeated.
pub(super) fn left_out() -> (u64, u64) {
    QUEUE.get().map_or((0, 0), |queue| {
        (queue.left.dropped.load(Ordering::Relaxed), queue.left.repeated.load(Ordering::Relaxed))
    })
}

fn write_lines(mut sink: impl Write, receiver: &Receiver<Message>, left: &Left) {
    let (mut told, mut next) = ((0, 0), Instant::now());
    loop {
        match receiver.recv_timeout(TELL_EVERY) {
            // Nothing can be said about a log that cannot be written.
            Ok(Message::Line(line)) => {
                let _ = sink.write_all(&line);
            }
            Ok(Message::Flush(done)) => {
                let _ = sink.flush();
                // Whoever asked may wait no more.
                let _ = done.send(());
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let now = (left.dropped.load(Ordering::Relaxed), left.repeated.load(Ordering::Relaxed));
        if now != told && Instant::now() >= next {
            next = Instant::now() + TELL_EVERY;
            let (dropped, repeated) = (now.0 - told.0, now.1 - told.1);
            tracing::warn!(
                dropped,
                repeated,
                "lines of this log were left out: too many at once, or too many of one kind in a second"
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

/// A line in the making: put into the queue when it is dropped.
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
    /// By place in the code: the second, and how many lines in it.
    lately: Mutex<HashMap<Identifier, (u64, u32)>>,
}

impl WithoutRepeats {
    fn passes(&self, of: &Metadata<'_>, second: u64) -> bool {
        if *of.level() > Level::INFO || (of.target() == NEVER_LEFT_OUT && of.fields().field(REFUSED).is_none()) {
            return true;
        }
        let mut lately = self.lately.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// A sink that takes nothing until it is opened.
    #[derive(Clone, Default)]
    struct Gate(Arc<(Mutex<Taken>, Condvar)>);

    /// Whether it is open, and what it has taken.
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
    fn nobody_waits_for_a_log_that_is_not_read_and_what_is_lost_is_counted() {
        let gate = Gate::default();
        let queue = LogQueue::to(gate.clone(), 10).expect("a thread");
        for number in 0..100 {
            writeln!(queue.make_writer(), "line {number}").expect("it is only queued");
        }
        queue.flush(Duration::ZERO);
        let dropped = queue.left.dropped.load(Ordering::Relaxed) as usize;
        // One may have been taken out of the queue.
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
            "a flush waits for what was queued before it"
        );
    }

    #[test]
    fn one_place_in_the_code_has_so_many_lines_a_second() {
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
        // A second may have ended meanwhile.
        assert!((REPEATS_MAX as usize..1000).contains(&count("repeated")), "{}", count("repeated"));
        assert!((REPEATS_MAX as usize..1000).contains(&count("without a right")), "{}", count("without a right"));
        let both = count("repeated") + count("without a right");
        assert_eq!(both as u64 + queue.left.repeated.load(Ordering::Relaxed), 2000);
        assert_eq!((count("never left out"), count("another")), (1000, 1));
    }
}
