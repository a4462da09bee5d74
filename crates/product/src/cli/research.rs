//! Options of moves by protocols that lose keys. Compiled only with the feature `research`, so that the product does not
//! offer them.

use clap::Args;
use switchyard_control::admin::{MoveOptionsRequest, PaperRequest};
use switchyard_policy::migration::tracker::Kind;

#[derive(Clone, Debug, Default, Args)]
pub(super) struct ResearchFlags {
    /// The protocol with corrections (safe), or with --allow-key-loss as in its paper (netmigrate, rocksteady, fulva,
    /// bloom): copies overwrite newer writes, deleted keys return, INCR starts from nothing, and filters are trusted
    #[arg(long, value_name = "MODE", value_parser = ["safe", "paper"])]
    mode: Option<String>,

    /// With --mode paper: structure that tracks the location of keys
    #[arg(long, value_name = "NAME", value_parser = Kind::ALL.map(Kind::name), requires = "mode")]
    tracker: Option<String>,

    /// With --mode paper: number of hash ranges, moved sequentially; for bloom, the number of keys of its filter
    #[arg(long, value_name = "COUNT", requires = "mode")]
    groups: Option<u32>,

    /// With --mode paper: bits of the filter for each group
    #[arg(long, value_name = "COUNT", requires = "mode")]
    bits: Option<u8>,

    /// With --mode paper: bytes of the counting filter of groups in progress, one for each counter; otherwise 16 for each
    /// of these groups
    #[arg(long, value_name = "BYTES", requires = "mode")]
    counting_bytes: Option<u32>,

    /// With --mode paper: number of groups in progress at a time; otherwise 4
    #[arg(long, value_name = "COUNT", requires = "mode")]
    groups_at_once: Option<u8>,

    /// With --mode paper: limit of the client commands per second that the source serves of keys in transit, so that the
    /// move gets the rest of its capacity. short, medium, long: 23, 54 or 100 % of the capacity of the source in [[node]].
    /// --goal and --max-rate limit the move instead
    #[arg(long, value_name = "COUNT|short|medium|long", requires = "mode")]
    source_ops_max: Option<String>,

    /// With --mode paper of bloom: the paper's variant without filter and forwarding
    #[arg(long, requires = "mode")]
    no_forwarding: bool,

    /// Accept a protocol that loses keys: stop-and-copy if a node restarts during the move, and --mode paper
    #[arg(long)]
    allow_key_loss: bool,
}

impl ResearchFlags {
    /// Adds these options to a request.
    pub(super) fn added_to(&self, request: MoveOptionsRequest) -> MoveOptionsRequest {
        let Self { tracker, groups, bits, counting_bytes, groups_at_once, source_ops_max, no_forwarding, .. } =
            self.clone();
        let paper =
            PaperRequest { tracker, groups, bits, counting_bytes, groups_at_once, source_ops_max, no_forwarding };
        let paper = (self.mode.as_deref() == Some("paper")).then(|| Box::new(paper));
        MoveOptionsRequest { paper, allow_key_loss: self.allow_key_loss, ..request }
    }
}
