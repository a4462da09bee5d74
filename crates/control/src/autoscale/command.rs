//! Starts and stops servers by a configured program: a script for systemd, Docker or a cloud.
//!
//! The program reads one line of JSON from its standard input and writes one to its standard output. `key` is the same
//! for every attempt at one change and unique to it, so the program can detect that it has already started this server.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use tracing::info;

use super::removal::Proof;
use super::{CommandConfig, Provisioner, ServerLocation, ServerSettings, StartedServer};
use crate::nodes::parse_endpoint;

/// Maximum length of an answer, in bytes.
const ANSWER_MAX: u64 = 1 << 16;

/// Part of a wrong answer that an error shows, in characters.
const SHOWN: usize = 200;

/// Limit of the program's standard error, in bytes. Later writes fail.
const STDERR_MAX: u64 = 1 << 20;

/// Last part of it that is read, in bytes.
const STDERR_READ: u64 = 1 << 12;

#[derive(Serialize)]
struct Request<'a> {
    /// `start` or `stop`.
    action: &'a str,
    key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<&'a str>,
}

/// Answer to `start`.
#[derive(Deserialize)]
struct Answer {
    address: String,
}

/// Provisioner that runs a program.
pub(super) struct Program {
    config: CommandConfig,
    site: String,
}

impl Program {
    pub(super) fn new(config: CommandConfig, site: String) -> Self {
        Self { config, site }
    }

    fn run_action(&self, action: &str, number: u64, address: Option<&str>) -> Result<Vec<u8>, String> {
        let request = Request { action, key: format!("{}-{number}", self.site), address };
        let line = serde_json::to_string(&request).map_err(|error| error.to_string())?;
        run(&self.config.run, &line, self.config.timeout)
    }
}

impl Provisioner for Program {
    fn choose(&self, _number: u64, _taken: &BTreeSet<String>) -> Result<Option<ServerLocation>, String> {
        Ok(None)
    }

    fn start(
        &self,
        number: u64,
        _chosen: Option<(&str, &StartedServer)>,
        _settings: ServerSettings<'_>,
    ) -> Result<String, String> {
        let answer = self.run_action("start", number, None)?;
        let shown: String =
            String::from_utf8_lossy(&answer).trim().chars().filter(|c| !c.is_control()).take(SHOWN).collect();
        let form = || format!("its answer to start is not {{\"address\": \"HOST:PORT\"}}: {shown}");
        let Answer { address } = serde_json::from_slice(&answer).map_err(|_| form())?;
        parse_endpoint(&address).map_err(|_| form())
    }

    fn stop(&self, started: &StartedServer, address: &str, _proof: Proof) -> Result<Option<String>, String> {
        self.run_action("stop", started.number, Some(address)).map(|_| None)
    }
}

/// Standard error of a program.
///
/// A file in memory rather than a pipe: a server that the program has started may keep its standard error, and would
/// get SIGPIPE after this router ends.
struct StderrBuffer(File);

impl StderrBuffer {
    fn new() -> Result<Self, String> {
        let file = memfd_create("stderr", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        file.map(|file| Self(file.into()))
            .map_err(|error| format!("cannot take the standard error of a program: {error}"))
    }

    fn sink(&self) -> Result<Stdio, String> {
        self.0
            .try_clone()
            .map(Stdio::from)
            .map_err(|error| format!("cannot take the standard error of a program: {error}"))
    }

    fn length(&self) -> u64 {
        self.0.metadata().map_or(0, |file| file.len())
    }

    /// Prevents further writes: they fail.
    fn seal(&self) {
        // Sealing again changes nothing.
        let _ = fcntl_add_seals(&self.0, SealFlags::GROW);
    }

    /// Returns the last lines, without control characters.
    fn lines(&self) -> Vec<String> {
        let length = self.length();
        let mut bytes = vec![0; length.min(STDERR_READ) as usize];
        let start = length - bytes.len() as u64;
        if self.0.read_exact_at(&mut bytes, start).is_err() {
            return Vec::new();
        }
        let plain = |line: &str| -> String {
            line.trim()
                .chars()
                .flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] })
                .collect()
        };
        String::from_utf8_lossy(&bytes).lines().map(plain).filter(|line| !line.is_empty()).collect()
    }

    /// Logs the lines and appends the last one to a failure.
    fn explain(&self, program: &str, failure: Option<String>) -> Option<String> {
        self.seal();
        let lines = self.lines();
        lines.iter().for_each(|line| info!(program, "stderr of a program of the configuration: {line}"));
        let last = lines.last().map(|line| line.chars().take(SHOWN).collect::<String>());
        failure.map(|failure| last.map_or(failure.clone(), |last| format!("{failure}: {last}")))
    }
}

/// Runs a program with this line as input, and returns its output.
pub(super) fn run(words: &[String], line: &str, timeout: Duration) -> Result<Vec<u8>, String> {
    let Some((program, words)) = words.split_first() else {
        return Err("[autoscale.command] names no program: restore the previous one".to_owned());
    };
    let complaints = StderrBuffer::new()?;
    let mut child = Command::new(program)
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(complaints.sink()?)
        .env_remove("NOTIFY_SOCKET")
        .env_remove("WATCHDOG_USEC")
        // So that its children are killed with it.
        .process_group(0)
        .spawn()
        .map_err(|error| format!("cannot start {program}: {error}"))?;
    if let Some(mut input) = child.stdin.take() {
        // Fails if the program has ended without reading its input.
        let _ = writeln!(input, "{line}");
    }
    let output = child.stdout.take();
    let reading = std::thread::spawn(move || {
        let mut answer = Vec::new();
        output.map(|output| output.take(ANSWER_MAX).read_to_end(&mut answer)).transpose().map(|_| answer)
    });
    let end = Instant::now() + timeout;
    let failure = loop {
        if complaints.length() > STDERR_MAX {
            complaints.seal();
        }
        match child.try_wait() {
            Ok(Some(status)) if status.success() => break None,
            Ok(Some(status)) => break Some(format!("{program} failed ({status})")),
            Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
            Ok(None) => {
                let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
                let _ = child.wait();
                break Some(format!("{program} took longer than {timeout:?} and was ended"));
            }
            Err(error) => return Err(format!("cannot wait for {program}: {error}")),
        }
    };
    if let Some(failure) = complaints.explain(program, failure) {
        return Err(failure);
    }
    // A descendant may hold the output open. Do not wait for it.
    let end = Instant::now() + Duration::from_secs(1);
    while !reading.is_finished() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    if !reading.is_finished() {
        return Err(format!(
            "{program} ended, but a process that it started keeps its output open: redirect the output of that process"
        ));
    }
    match reading.join() {
        Ok(Ok(answer)) => Ok(answer),
        _ => Err(format!("cannot read what {program} wrote")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn none(_: &str) -> Result<String, String> {
        Ok(String::new())
    }

    fn program(script: &str, timeout: Duration) -> Program {
        let run = ["sh", "-c", script].map(str::to_owned).to_vec();
        Program::new(CommandConfig { run, timeout }, "site".to_owned())
    }

    #[test]
    fn programs_receive_requests_as_json() {
        let patient = Duration::from_secs(20);
        let echo = program(
            r#"read line; case "$line" in *'"action":"start","key":"site-3"'*) echo '{"address": "10.0.0.9:7000"}';; *) exit 3;; esac"#,
            patient,
        );
        assert_eq!(echo.start(3, None, &none), Ok("10.0.0.9:7000".to_owned()));
        assert!(
            echo.run_action("stop", 3, Some("10.0.0.9:7000")).is_err_and(|why| why.contains("failed (exit status: 3)"))
        );
        assert!(
            program("echo nonsense", patient)
                .start(1, None, &none)
                .is_err_and(|why| why.contains("HOST:PORT") && why.contains("nonsense"))
        );
    }

    #[test]
    fn a_failure_ends_with_the_last_line_of_stderr() {
        let failure =
            |script: &str| program(script, Duration::from_secs(20)).start(1, None, &none).expect_err("it fails");
        assert_eq!(
            failure("echo starting >&2; echo 'quota exceeded in zone b' >&2; exit 3"),
            "sh failed (exit status: 3): quota exceeded in zone b"
        );
        assert_eq!(failure("exit 3"), "sh failed (exit status: 3)");
        assert_eq!(
            failure("printf 'a\\033[31mb\\377\\n\\n' >&2; exit 1"),
            "sh failed (exit status: 1): a\\u{1b}[31mb\u{fffd}"
        );
        let long = failure("head -c 10000 /dev/zero | tr '\\0' x >&2; exit 1");
        assert_eq!(long.chars().filter(|c| *c == 'x').count(), SHOWN + 1, "one is in \"exit\": {long}");
        let late =
            program("echo 'waiting for a machine' >&2; sleep 60", Duration::from_millis(500)).start(1, None, &none);
        assert_eq!(late, Err("sh took longer than 500ms and was ended: waiting for a machine".to_owned()));
    }

    #[test]
    fn a_server_that_keeps_stderr_survives_its_writes_there() {
        let dir = tempfile::tempdir().expect("a directory");
        let (go, wrote) = (dir.path().join("go"), dir.path().join("wrote"));
        let script = format!(
            "(until [ -e {} ]; do sleep 0.01; done; echo late >&2; echo $? > {}) >/dev/null & echo '{{\"address\": \"10.0.0.9:7000\"}}'",
            go.display(),
            wrote.display()
        );
        assert_eq!(program(&script, Duration::from_secs(20)).start(1, None, &none), Ok("10.0.0.9:7000".to_owned()));
        fs::write(go, "").expect("written");
        // The write fails, and the server continues.
        let end = Instant::now() + Duration::from_secs(60);
        let mut status = String::new();
        while !status.ends_with('\n') {
            assert!(Instant::now() < end, "the server has ended");
            std::thread::sleep(Duration::from_millis(10));
            status = fs::read_to_string(&wrote).unwrap_or_default();
        }
        assert_eq!(status, "1\n", "the status of echo");
    }

    #[test]
    fn a_program_that_is_late_ends_with_what_it_started() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("pid");
        let slow = program(&format!("sleep 60 & echo $! > {}; wait", file.display()), Duration::from_millis(500));
        assert!(slow.start(1, None, &none).is_err_and(|why| why.contains("took longer than 500ms")));
        let child = fs::read_to_string(file).expect("it was started");
        let state = || fs::read_to_string(format!("/proc/{}/stat", child.trim())).unwrap_or_default();
        while !state().is_empty() && !state().contains(") Z") {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
