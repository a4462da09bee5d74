//! Command line: one module per subcommand, with its arguments, help and implementation.

mod admin_client;
mod autoscale;
mod balance;
mod bench;
mod capacity;
mod check_config;
mod colocation;
mod demo;
mod doctor;
mod flags;
mod hash_password;
mod hot_copies;
mod hot_keys;
mod http;
mod known_fleet;
mod live;
mod live_lines;
mod map;
mod move_slots;
mod moves;
mod nodes;
mod plan;
mod recover;
#[cfg(feature = "research")]
mod research;
mod rules;
mod screen;
mod serve;
mod status;
mod table;
mod upgrade;

use std::fmt;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::config::Problems;

pub(crate) use admin_client::AdminClient;

/// A switch for Redis and Valkey: one address in front of many servers.
#[derive(Debug, Parser)]
#[command(
    name = "switchyard",
    version = concat!(env!("CARGO_PKG_VERSION"), " (", env!("SWITCHYARD_COMMIT"), ")"),
    propagate_version = true,
    max_term_width = 100,
    long_about = "A switch for Redis and Valkey: one address in front of many ordinary servers.\n\n\
        Clients connect to Switchyard as they would to one Redis server. It knows the server of every key and forwards each \
        command to the server that has it.",
    after_long_help = "Examples:\n  \
        switchyard serve --node 127.0.0.1:7001 --node 127.0.0.1:7002    route to two local servers\n  \
        redis-cli -p 6380 set greeting hello                            and use them as one\n  \
        switchyard status                                               the state of a running router\n  \
        switchyard nodes add 127.0.0.1:7003 --rebalance                 another server, with its share of the keys\n  \
        switchyard where user:1000                                      which of them has this key?\n  \
        switchyard check-config -c /etc/switchyard.toml                 find mistakes before a reload does\n\n\
        Exit codes:\n  \
        0  success; for serve: stopped by a signal\n  \
        1  failure: the message has the problem, the place and the remedy\n  \
        2  the command line or the configuration is wrong\n  \
        3  serve: the state directory is older than the one last used to serve the nodes"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::Arguments),
    CheckConfig(check_config::Arguments),
    HashPassword(hash_password::Arguments),
    Status(status::Arguments),
    Nodes(nodes::Arguments),
    Slots(map::SlotsArguments),
    Where(map::WhereArguments),
    Colocation(colocation::Arguments),
    #[command(name = "hotkeys")]
    HotKeys(hot_keys::Arguments),
    HotCopies(hot_copies::Arguments),
    Move(move_slots::Arguments),
    Moves(moves::Arguments),
    Balance(balance::Arguments),
    Rules(rules::Arguments),
    Plan(plan::Arguments),
    Automation(plan::AutomationArguments),
    Autoscale(autoscale::Arguments),
    Doctor(doctor::Arguments),
    Recover(recover::Arguments),
    Upgrade(upgrade::Arguments),
    Demo(demo::Arguments),
    Bench(bench::Arguments),
}

/// Reason for the failure of a subcommand.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The request was valid but failed: exit code 1.
    Failed(anyhow::Error),
    /// The configuration has mistakes: exit code 2.
    Config(Problems),
    /// The state directory is outdated: exit code 3. A restart does not help.
    Outdated(switchyard_control::ownership::Outdated),
    /// Replaced by another router without being a standby: exit code 3.
    Replaced(String),
    /// Result of `status --check`, with its exit code.
    Checked { code: u8, why: String },
}

impl Failure {
    /// Exit code of the process.
    pub(crate) fn code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::Config(_) => 2,
            Self::Outdated(_) | Self::Replaced(_) => 3,
            Self::Checked { code, .. } => *code,
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // All causes on one line, outermost first.
            Failure::Failed(error) => write!(f, "switchyard: {error:#}"),
            Failure::Config(problems) => write!(f, "{problems}"),
            Failure::Outdated(why) => write!(f, "switchyard: {why}"),
            Failure::Replaced(why) => write!(f, "switchyard: {why}"),
            Failure::Checked { why, .. } => f.write_str(why),
        }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        error.downcast().map_or_else(Failure::Failed, Failure::Outdated)
    }
}

impl From<Problems> for Failure {
    fn from(problems: Problems) -> Self {
        Failure::Config(problems)
    }
}

impl Cli {
    /// Parses the command line. clap itself ends the process for --help (0) and for a wrong command line (2).
    pub(crate) fn read() -> Self {
        let matches = Self::shown().get_matches();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }

    /// The command line with hidden flags.
    fn shown() -> clap::Command {
        ["check-config", "doctor", "recover"]
            .iter()
            .fold(Self::command(), |command, verb| command.mut_subcommand(verb, flags::hide_flags_of_serve))
    }
}

/// Runs the subcommand.
pub(crate) fn run(cli: Cli) -> Result<(), Failure> {
    match cli.command {
        Command::Serve(arguments) => serve::run(&arguments),
        Command::HashPassword(arguments) => hash_password::run(&arguments),
        Command::CheckConfig(arguments) => check_config::run(&arguments),
        Command::Status(arguments) => status::run(&arguments),
        Command::Nodes(arguments) => nodes::run(&arguments),
        Command::Slots(arguments) => map::slots(&arguments),
        Command::Where(arguments) => map::whereabouts(&arguments),
        Command::Colocation(arguments) => colocation::run(&arguments),
        Command::HotKeys(arguments) => hot_keys::run(&arguments),
        Command::HotCopies(arguments) => hot_copies::run(&arguments),
        Command::Move(arguments) => move_slots::run(&arguments),
        Command::Moves(arguments) => moves::run(&arguments),
        Command::Balance(arguments) => balance::run(&arguments),
        Command::Rules(arguments) => rules::run(&arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Automation(arguments) => plan::run_automation(&arguments),
        Command::Autoscale(arguments) => autoscale::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Recover(arguments) => recover::run(&arguments),
        Command::Upgrade(arguments) => upgrade::run(&arguments),
        Command::Demo(arguments) => demo::run(&arguments),
        Command::Bench(arguments) => bench::run(&arguments),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::Cli;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::shown().debug_assert();
    }

    #[test]
    fn admin_flags_may_precede_or_follow_the_nested_subcommand() {
        for (line, is_heard) in [
            (
                "nodes --admin a:1 --json remove n",
                "RemoveArguments { address: \"n\", flags: AdminFlags { admin: Some(\"a:1\")",
            ),
            (
                "nodes remove n --admin a:1 --json",
                "RemoveArguments { address: \"n\", flags: AdminFlags { admin: Some(\"a:1\")",
            ),
            (
                "nodes --json remove --admin a:1 n",
                "RemoveArguments { address: \"n\", flags: AdminFlags { admin: Some(\"a:1\")",
            ),
            ("moves --json --admin a:1 pause 7", "IdArguments { id: 7, flags: AdminFlags { admin: Some(\"a:1\")"),
        ] {
            let line = std::iter::once("switchyard").chain(line.split(' '));
            let command = format!("{:?}", Cli::try_parse_from(line).expect("it is understood").command);
            let (_, flags) = command.split_once(is_heard).unwrap_or_else(|| panic!("{command}"));
            let (flags, _) = flags.split_once('}').expect("their end");
            assert!(flags.contains("json: true"), "{command}");
        }
        let nodes = format!(
            "{:?}",
            Cli::try_parse_from(["switchyard", "nodes", "--admin", "a:1"]).expect("it is understood").command
        );
        assert!(nodes.contains("Some(\"a:1\")"), "{nodes}");
    }

    #[test]
    fn help_shows_only_relevant_flags() {
        let help = |verb: &str| {
            let mut all = Cli::shown();
            all.find_subcommand_mut(verb).expect("a verb").render_long_help().to_string()
        };
        for verb in ["check-config", "doctor", "recover"] {
            let help = help(verb);
            for flag in ["--config", "--node ", "--set", "--state-dir", "--node-password-file"] {
                assert!(help.contains(flag), "{verb} without {flag}:\n{help}");
            }
            for flag in ["--listen", "--port", "--workers", "--log-level", "--cluster", "--allow-open-listener"] {
                assert!(
                    !help.contains(&format!("{flag} <")) && !help.contains(&format!("{flag}\n")),
                    "{verb} with {flag}:\n{help}"
                );
            }
        }
        assert!(help("serve").contains("--listen <") && help("serve").contains("--log-level <"));
    }
}
