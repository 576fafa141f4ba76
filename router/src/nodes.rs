//! The nodes of one role, how much each has to do, and which one gets the next leg.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use axum::http::HeaderValue;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::address::NodeUrl;
use crate::metrics::RoleLevels;

/// What a node is used for. Any node can do either part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Role {
    Prefill,
    Decode,
}

impl Role {
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// A node's name within the router.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct NodeId {
    pub role: Role,
    pub index: usize,
}

/// One node.
#[derive(Debug)]
pub(crate) struct Node {
    pub id: NodeId,
    pub url: NodeUrl,
    /// Stands for the host in request URLs where the host is a scoped IPv6 address.
    pub alias: String,
    /// The `Host` header, where the URL's own host is that alias.
    pub host: Option<HeaderValue>,
    up: AtomicBool,
    failed_checks: AtomicU32,
    legs: AtomicUsize,
    tokens: AtomicU64,
    /// Asks for a check of health now.
    pub check: Notify,
}

/// Checks that must fail in a row, unless nobody listens at all: a node whose processors are all busy
/// computing may be late to answer, and is not down.
const FAILED_CHECKS: u32 = 3;

/// Tokens that stand for the fixed cost of a leg when loads are compared.
const LEG_TOKENS: u64 = 512;

impl Node {
    fn new(role: Role, index: usize, url: NodeUrl) -> Self {
        let alias = format!("{}-{index}.kvx-node.invalid", role.name());
        let host = url
            .scoped()
            .and_then(|_| HeaderValue::from_str(&url.authority()).ok());
        Self {
            id: NodeId { role, index },
            url,
            alias,
            host,
            up: AtomicBool::new(true),
            failed_checks: AtomicU32::new(0),
            legs: AtomicUsize::new(0),
            tokens: AtomicU64::new(0),
            check: Notify::new(),
        }
    }

    /// Whether legs are sent to it.
    pub fn is_up(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }

    /// Legs that it works on for this router.
    pub fn legs(&self) -> usize {
        self.legs.load(Ordering::Relaxed)
    }

    /// It answered.
    pub fn healthy(&self) {
        self.failed_checks.store(0, Ordering::Relaxed);
        if !self.up.swap(true, Ordering::Relaxed) {
            tracing::info!(node = %self.url, role = self.id.role.name(), "node is up again");
        }
    }

    /// A check of its health failed; `refused` says that nobody listens there, or that it said so itself.
    pub fn unhealthy(&self, refused: bool, why: &str) {
        let failed = self
            .failed_checks
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1);
        if (refused || failed >= FAILED_CHECKS) && self.up.swap(false, Ordering::Relaxed) {
            tracing::warn!(node = %self.url, role = self.id.role.name(), why, "node is down");
        }
    }

    /// A leg could not be sent there.
    pub fn unreachable(&self, why: &str) {
        self.unhealthy(true, why);
        self.check.notify_one();
    }

    fn load(&self) -> u64 {
        let legs = u64::try_from(self.legs()).unwrap_or(u64::MAX);
        legs.saturating_mul(LEG_TOKENS)
            .saturating_add(self.tokens.load(Ordering::Relaxed))
    }
}

/// A leg that a node works on; counts as its load until dropped.
#[derive(Debug)]
pub(crate) struct Busy {
    pub node: Arc<Node>,
    tokens: u64,
}

impl Busy {
    fn new(node: Arc<Node>, tokens: u64) -> Self {
        node.legs.fetch_add(1, Ordering::Relaxed);
        node.tokens.fetch_add(tokens, Ordering::Relaxed);
        Self { node, tokens }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.node.legs.fetch_sub(1, Ordering::Relaxed);
        self.node.tokens.fetch_sub(self.tokens, Ordering::Relaxed);
    }
}

/// All nodes of a role.
#[derive(Debug)]
pub(crate) struct Group {
    role: Role,
    nodes: Vec<Arc<Node>>,
    /// How many legs like the next one a preferred node may be ahead of the least loaded one.
    slack: u64,
    /// Where to start looking. Held while choosing, so that two legs that come at once do not both see
    /// the same node idle.
    turn: Mutex<usize>,
}

impl Group {
    pub fn new(role: Role, urls: &[NodeUrl], slack: u32) -> Self {
        let nodes = urls
            .iter()
            .enumerate()
            .map(|(index, url)| Arc::new(Node::new(role, index, url.clone())))
            .collect();
        Self {
            role,
            nodes,
            slack: slack.into(),
            turn: Mutex::new(0),
        }
    }

    pub fn nodes(&self) -> &[Arc<Node>] {
        &self.nodes
    }

    pub fn get(&self, index: usize) -> Option<&Arc<Node>> {
        self.nodes.get(index)
    }

    /// The node for a leg of about `tokens` tokens: `preferred` if it is up and not overloaded, else the
    /// one with the least to do, in turn among equals; none of `tried`.
    pub fn choose(&self, preferred: Option<usize>, tried: &[usize], tokens: u64) -> Option<Busy> {
        let mut turn = self.turn.lock();
        let start = *turn;
        let (ahead, behind) = self.nodes.split_at(start.min(self.nodes.len()));
        let open = |node: &&Arc<Node>| node.is_up() && !tried.contains(&node.id.index);
        let least = behind
            .iter()
            .chain(ahead)
            .filter(open)
            .min_by_key(|node| node.load())?;
        let allowed = LEG_TOKENS
            .saturating_add(tokens)
            .saturating_mul(self.slack)
            .saturating_add(least.load());
        let chosen = preferred
            .and_then(|index| self.nodes.get(index))
            .filter(open)
            .filter(|node| node.load() <= allowed)
            .unwrap_or(least);
        *turn = chosen.id.index.saturating_add(1);
        Some(Busy::new(Arc::clone(chosen), tokens))
    }

    /// Whether any node of it is up.
    pub fn any_up(&self) -> bool {
        self.nodes.iter().any(|node| node.is_up())
    }

    pub fn levels(&self) -> RoleLevels {
        let up = self.nodes.iter().filter(|node| node.is_up()).count();
        RoleLevels {
            role: self.role.name(),
            up,
            down: self.nodes.len().saturating_sub(up),
            in_flight: self.nodes.iter().map(|node| node.legs()).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(count: usize, slack: u32) -> Group {
        let urls: Vec<_> = (0..count)
            .map(|i| format!("node{i}:80").parse().unwrap())
            .collect();
        Group::new(Role::Decode, &urls, slack)
    }

    fn index(busy: &Busy) -> usize {
        busy.node.id.index
    }

    #[test]
    fn idle_nodes_take_turns() {
        let group = group(3, 4);
        let order: Vec<_> = (0..6)
            .map(|_| index(&group.choose(None, &[], 10).unwrap()))
            .collect();
        assert_eq!(order, [0, 1, 2, 0, 1, 2]);
    }

    #[test]
    fn the_least_loaded_is_chosen() {
        let group = group(3, 4);
        let _a = group.choose(None, &[], 10_000).unwrap();
        let _b = group.choose(None, &[], 10).unwrap();
        let _c = group.choose(None, &[], 10).unwrap();
        let next: Vec<_> = (0..4)
            .map(|_| group.choose(None, &[], 10).unwrap())
            .collect();
        assert!(next.iter().all(|busy| index(busy) != 0), "{next:?}");
        drop((_a, _b, _c, next));
        assert!(group.nodes.iter().all(|node| node.load() == 0));
    }

    #[test]
    fn a_preferred_node_is_kept_until_it_is_overloaded() {
        let group = group(2, 3);
        let held: Vec<_> = (0..3)
            .map(|_| group.choose(Some(1), &[], 100).unwrap())
            .collect();
        assert!(held.iter().all(|busy| index(busy) == 1));
        let fourth = group.choose(Some(1), &[], 100).unwrap();
        assert_eq!(index(&fourth), 1, "three legs ahead is within the slack");
        assert_eq!(index(&group.choose(Some(1), &[], 100).unwrap()), 0);
    }

    #[test]
    fn nodes_that_are_down_or_were_tried_are_left_out() {
        let group = group(3, 4);
        group.nodes[0].unreachable("refused");
        assert_eq!(index(&group.choose(Some(0), &[1], 1).unwrap()), 2);
        assert!(group.choose(None, &[1, 2], 1).is_none());
        group.nodes[0].healthy();
        assert_eq!(index(&group.choose(Some(0), &[1, 2], 1).unwrap()), 0);
    }

    #[test]
    fn a_late_answer_does_not_take_a_node_down_but_three_do() {
        let group = group(1, 4);
        let node = &group.nodes[0];
        node.unhealthy(false, "late");
        node.unhealthy(false, "late");
        assert!(node.is_up());
        node.healthy();
        for _ in 0..3 {
            node.unhealthy(false, "late");
        }
        assert!(!node.is_up());
    }
}
