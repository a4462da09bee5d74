//! INFO, as a command of a client.

use switchyard_resp::encode;

use super::{ASKED, Digest, FRESH_US, WHO_ANSWERS, info_text, shows};
use crate::lane::Lane;
use crate::lock::lock;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use crate::worker::downstreams::Downstreams;
use crate::worker::downstreams::waits::Stall;
use crate::worker::fan_out::FanOutScope;
use crate::worker::flow::Flow;
use crate::worker::gather::{Aggregation, FanOut, Gathers};
use crate::worker::silent_nodes::{is_silent, timeout_of};
use crate::worker::turn::Turn;
use crate::worker::upstreams::Upstreams;

impl Gathers {
    pub(in crate::worker) fn info(
        &mut self,
        turn: &Turn,
        up: &Upstreams,
        down: &mut Downstreams,
        routing: &RoutingSnapshot,
        handle: Handle,
        class: u8,
        sections: Vec<String>,
    ) -> Flow {
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        // The figures must include the client's earlier commands.
        if !client.may_take(Lane::Main) || client.in_flight() > 0 && shows(&sections, "errorstats") {
            return Flow::Stall(Stall::Barrier);
        }
        let named = ASKED.iter().enumerate().filter(|(_, section)| shows(&sections, section) && **section != "cluster");
        let mut asked = named.fold(0, |asked, (place, _)| asked | 1 << place);
        if asked == 0 && shows(&sections, "switchyard") {
            asked = WHO_ANSWERS;
        }
        let (wrote_us, in_flight, resp3) = (client.replies().wrote_us(), client.in_flight(), client.resp3());
        let mut none = Digest::default();
        let is_fresh = |digest: &&Digest| {
            asked & !digest.sections == 0
                && turn.now_us() < digest.queried_us + FRESH_US
                && in_flight == 0
                && wrote_us.is_none_or(|us| us + FRESH_US < digest.queried_us)
        };
        let timeout_us = timeout_of(turn, down, handle);
        let (silent, talking): (Vec<_>, Vec<_>) =
            up.links().reachable(turn).into_iter().partition(|node| is_silent(turn, up, *node, timeout_us));
        // Last known figures of nodes that are not queried.
        let shared = &turn.shared();
        let add_silent = |digest: &mut Digest| {
            silent.iter().filter_map(|node| shared.last_info(*node)).for_each(|text| digest.add(&text))
        };
        let known = if asked == 0 || talking.is_empty() {
            add_silent(&mut none);
            Some(&none)
        } else {
            self.last_info().filter(is_fresh)
        };
        if let Some(known) = known {
            let text = info_text(turn, known, &sections);
            let mut out = Vec::new();
            encode::verbatim(&mut out, text.as_bytes(), resp3);
            down.answer(turn, handle, class, &out);
            return Flow::Next;
        }
        let names: Vec<&str> =
            ASKED.iter().enumerate().filter(|(place, _)| asked & 1 << place != 0).map(|(_, name)| *name).collect();
        // Redis before version 7 accepts one section at most.
        let takes_several = || {
            let nodes = lock(&turn.shared().nodes);
            let major = |version: &str| version.split('.').next().and_then(|major| major.parse::<u32>().ok());
            routing
                .topology
                .nodes()
                .all(|node| nodes.get(&node.id).is_some_and(|facts| major(&facts.redis_version) >= Some(7)))
        };
        let words = match () {
            () if names.len() == 1 || takes_several() => names,
            () if names.contains(&"commandstats") => vec!["all"],
            () => Vec::new(),
        };
        let mut request = Vec::new();
        encode::command(&mut request, std::iter::once("INFO").chain(words).map(str::as_bytes).collect::<Vec<_>>());
        let mut digest = Box::new(Digest { sections: asked, queried_us: turn.now_us(), ..Digest::default() });
        add_silent(&mut digest);
        self.fan_out(
            turn,
            down,
            FanOut {
                client: handle,
                lane: Lane::Main,
                reach: FanOutScope::Everybody,
                requests: vec![request],
                class,
                whole: Aggregation::Info { sections, digest },
            },
        )
    }
}
