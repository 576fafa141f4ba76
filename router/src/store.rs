//! What is remembered of conversations: handles, each used once, and where a conversation was served.
//!
//! Metadata only. A handle is the `kv_transfer_params` that a node gave with its last answer; it says
//! where the conversation's KV blocks are. Keys are made of tenant, model and conversation, so that
//! nobody reaches a handle with another's id.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use parking_lot::Mutex;

use crate::conversation::{ConversationId, Key, Tenant, key};
use crate::nodes::NodeId;

/// The limits of a [`Store`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub ttl: Duration,
    pub conversations: u64,
    /// Of all handles together.
    pub bytes: u64,
    /// Of one handle.
    pub handle_bytes: usize,
}

/// Where a conversation's blocks are, in the words of the node that holds them.
#[derive(Debug, Clone)]
pub(crate) struct Handle {
    /// A JSON object.
    pub params: Arc<str>,
    pub holder: NodeId,
    stored: Instant,
}

impl Handle {
    pub fn new(params: &str, holder: NodeId) -> Self {
        Self {
            params: params.into(),
            holder,
            stored: Instant::now(),
        }
    }

    pub fn age(&self) -> Duration {
        self.stored.elapsed()
    }
}

/// Why a turn has no handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Miss {
    /// The request names no conversation and continues none that is known.
    NoConversation,
    /// Nothing is known of the conversation.
    Unknown,
    /// It is known, with another model.
    OtherModel,
    /// The handle was too old to be of use.
    Expired,
    /// It had to make room for others.
    Evicted,
    /// It was larger than what is kept.
    TooLarge,
    /// Another turn of the conversation is under way and took it.
    InUse,
    /// An earlier turn took it, and did not end with a new one.
    Used,
    /// The answer of the turn before brought none.
    NoParams,
    /// The node that holds the blocks is down.
    NodeGone,
    /// Handles are not kept at all.
    BidirectionalOff,
    /// There are several prompts, and a handle speaks of one.
    ManyPrompts,
}

impl Miss {
    pub fn name(self) -> &'static str {
        match self {
            Self::NoConversation => "no_conversation",
            Self::Unknown => "unknown",
            Self::OtherModel => "other_model",
            Self::Expired => "expired",
            Self::Evicted => "evicted",
            Self::TooLarge => "too_large",
            Self::InUse => "in_use",
            Self::Used => "used",
            Self::NoParams => "no_params",
            Self::NodeGone => "node_gone",
            Self::BidirectionalOff => "bidirectional_off",
            Self::ManyPrompts => "many_prompts",
        }
    }
}

/// The nodes that served a conversation last, and so may still have some of it cached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Homes {
    pub prefill: Option<usize>,
    pub decode: Option<usize>,
}

/// What became of a conversation's handle.
#[derive(Debug, Clone, Copy)]
enum Fate {
    Stored(Instant),
    Taken,
    NoParams,
    TooLarge,
}

#[derive(Debug, Clone, Copy)]
struct Trace {
    fate: Fate,
    homes: Homes,
}

/// A conversation's place in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    key: Key,
    any_model: Key,
    model: Key,
}

impl Place {
    pub fn new(tenant: &Tenant, model: &str, id: &ConversationId) -> Self {
        let (tenant, id) = (tenant.as_bytes(), id.name().as_bytes());
        Self {
            key: key("conversation", &[tenant, model.as_bytes(), id]),
            any_model: key("conversation of any model", &[tenant, id]),
            model: key("model", &[model.as_bytes()]),
        }
    }
}

const SHARDS: usize = 16;

/// Everything remembered. Shared by all requests; every part of it is sharded.
#[derive(Debug)]
pub(crate) struct Store {
    limits: Limits,
    handles: Cache<Key, Arc<Handle>>,
    traces: Cache<Key, Trace>,
    /// By conversation of any model, the model it was last seen with.
    models: Cache<Key, Key>,
    /// By beginning of a history, the conversation that it belongs to.
    beginnings: Cache<Key, Arc<str>>,
    /// Turns under way, by conversation.
    turns: [Mutex<HashMap<Key, usize>>; SHARDS],
}

impl Store {
    pub fn new(limits: Limits) -> Self {
        // A handle weighs at least its share, so that one limit bounds bytes and count.
        let share = limits.bytes / limits.conversations.max(1);
        let share = u32::try_from(share).unwrap_or(u32::MAX).max(1);
        let weigh = move |_: &Key, handle: &Arc<Handle>| {
            u32::try_from(handle.params.len())
                .unwrap_or(u32::MAX)
                .max(share)
        };
        // Whether a handle is too old is decided here, with a reason; the cache only clears away.
        let clear = limits.ttl.saturating_add(Duration::from_secs(5));
        let memory = limits.ttl.saturating_mul(4).max(clear);
        let remember = limits.conversations.saturating_mul(4);
        Self {
            limits,
            handles: Cache::builder()
                .eviction_policy(EvictionPolicy::lru())
                .weigher(weigh)
                .max_capacity(limits.bytes)
                .time_to_live(clear)
                .build(),
            traces: lru(remember, memory),
            models: lru(remember, memory),
            beginnings: lru(remember, memory),
            turns: std::array::from_fn(|_| Mutex::default()),
        }
    }

    /// Begins a turn: takes the conversation's handle out, if it has one.
    pub fn begin(self: &Arc<Self>, place: Place) -> (Turn, Result<Taken, Miss>) {
        let (turn, others) = Turn::begin(self, place);
        let found = self.take(&place).map_err(|miss| match miss {
            Miss::Unknown | Miss::Used if others => Miss::InUse,
            miss => miss,
        });
        self.models.insert(place.any_model, place.model);
        (turn, found)
    }

    fn take(self: &Arc<Self>, place: &Place) -> Result<Taken, Miss> {
        let trace = self.traces.get(&place.key);
        let Some(handle) = self.handles.remove(&place.key) else {
            return Err(match trace.map(|t| t.fate) {
                Some(Fate::Stored(at)) if at.elapsed() >= self.limits.ttl => Miss::Expired,
                Some(Fate::Stored(_)) => Miss::Evicted,
                Some(Fate::Taken) => Miss::Used,
                Some(Fate::NoParams) => Miss::NoParams,
                Some(Fate::TooLarge) => Miss::TooLarge,
                None => match self.models.get(&place.any_model) {
                    Some(model) if model != place.model => Miss::OtherModel,
                    _ => Miss::Unknown,
                },
            });
        };
        self.trace(place, Fate::Taken, None);
        if handle.age() >= self.limits.ttl {
            return Err(Miss::Expired);
        }
        Ok(Taken {
            store: Arc::clone(self),
            place: *place,
            handle,
            spent: false,
        })
    }

    /// Stores what the last answer said of where the blocks are. Says whether it is small enough.
    pub fn put(&self, place: &Place, handle: Handle, homes: Homes) -> bool {
        let fits = handle.params.len() <= self.limits.handle_bytes;
        if fits {
            // The trace first: whoever finds the handle gone then knows that it was there.
            self.trace(place, Fate::Stored(handle.stored), Some(homes));
            self.handles.insert(place.key, Arc::new(handle));
        } else {
            self.handles.invalidate(&place.key);
            self.trace(place, Fate::TooLarge, Some(homes));
        }
        fits
    }

    /// Notes that an answer ended without saying where the blocks are.
    pub fn put_nothing(&self, place: &Place, homes: Homes) {
        self.trace(place, Fate::NoParams, Some(homes));
    }

    /// Where the conversation was served last.
    pub fn homes(&self, place: &Place) -> Homes {
        self.traces
            .get(&place.key)
            .map(|t| t.homes)
            .unwrap_or_default()
    }

    fn trace(&self, place: &Place, fate: Fate, homes: Option<Homes>) {
        let homes = homes.unwrap_or_else(|| self.homes(place));
        self.traces.insert(place.key, Trace { fate, homes });
    }

    fn put_back(&self, place: &Place, handle: &Arc<Handle>) {
        if handle.age() < self.limits.ttl {
            let entry = self.handles.entry(place.key).or_insert(Arc::clone(handle));
            if entry.is_fresh() {
                self.trace(place, Fate::Stored(handle.stored), None);
            }
        }
    }

    /// Remembers that a history that begins so belongs to a conversation.
    pub fn remember(&self, beginning: Key, id: &ConversationId) {
        self.beginnings.insert(beginning, Arc::clone(id.name()));
    }

    /// The conversation to which the first known one of `beginnings` belongs.
    pub fn recall(&self, beginnings: &[Key]) -> Option<ConversationId> {
        beginnings
            .iter()
            .find_map(|beginning| self.beginnings.get(beginning))
            .map(ConversationId::again)
    }

    /// Whether a turn of the conversation is under way.
    pub fn in_use(&self, place: &Place) -> bool {
        self.shard(place)
            .is_some_and(|turns| turns.lock().contains_key(&place.key))
    }

    /// Whether a handle is there.
    pub fn has(&self, place: &Place) -> bool {
        self.handles.contains_key(&place.key)
    }

    /// Handles held, and their bytes.
    pub fn held(&self) -> (u64, u64) {
        self.handles.run_pending_tasks();
        let bytes = self
            .handles
            .iter()
            .map(|(_, handle)| handle.params.len())
            .sum::<usize>();
        (
            self.handles.entry_count(),
            bytes.try_into().unwrap_or(u64::MAX),
        )
    }

    fn shard(&self, place: &Place) -> Option<&Mutex<HashMap<Key, usize>>> {
        // The key is a hash: any byte of it spreads well.
        let [first, ..] = place.key;
        self.turns.get(usize::from(first) % SHARDS)
    }
}

fn lru<V: Clone + Send + Sync + 'static>(entries: u64, ttl: Duration) -> Cache<Key, V> {
    Cache::builder()
        .eviction_policy(EvictionPolicy::lru())
        .max_capacity(entries)
        .time_to_live(ttl)
        .build()
}

/// A turn under way.
#[derive(Debug)]
pub(crate) struct Turn {
    store: Arc<Store>,
    place: Place,
}

impl Turn {
    /// Also says whether others are under way.
    fn begin(store: &Arc<Store>, place: Place) -> (Self, bool) {
        let mut others = false;
        if let Some(shard) = store.shard(&place) {
            let mut turns = shard.lock();
            let count = turns.entry(place.key).or_default();
            others = *count > 0;
            *count = count.saturating_add(1);
        }
        let store = Arc::clone(store);
        (Self { store, place }, others)
    }

    pub fn place(&self) -> &Place {
        &self.place
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(shard) = self.store.shard(&self.place) {
            let mut turns = shard.lock();
            if let Some(count) = turns.get_mut(&self.place.key) {
                *count = count.saturating_sub(1);
                if *count == 0 {
                    turns.remove(&self.place.key);
                }
            }
        }
    }
}

/// A handle that was taken out. Goes back when dropped, unless a node may have used it.
#[derive(Debug)]
pub(crate) struct Taken {
    store: Arc<Store>,
    place: Place,
    handle: Arc<Handle>,
    spent: bool,
}

impl Taken {
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Says whether a node may have used it.
    pub fn set_spent(&mut self, spent: bool) {
        self.spent = spent;
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if !self.spent {
            self.store.put_back(&self.place, &self.handle);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::Role;

    const LIMITS: Limits = Limits {
        ttl: Duration::from_secs(3600),
        conversations: 100,
        bytes: 100_000,
        handle_bytes: 10_000,
    };

    const HOLDER: NodeId = NodeId {
        role: Role::Decode,
        index: 2,
    };

    fn place(model: &str, name: &str) -> Place {
        let tenant = Tenant::of(&axum::http::HeaderMap::new());
        Place::new(&tenant, model, &ConversationId::again(name.into()))
    }

    fn miss(store: &Arc<Store>, place: Place) -> Miss {
        store.begin(place).1.unwrap_err()
    }

    fn put(store: &Store, place: &Place, params: &str) -> bool {
        store.put(place, Handle::new(params, HOLDER), Homes::default())
    }

    #[test]
    fn a_handle_is_used_once() {
        let store = Arc::new(Store::new(LIMITS));
        let place = place("m", "c");
        assert_eq!(miss(&store, place), Miss::Unknown);
        assert!(put(&store, &place, "{}"));
        let (first, taken) = store.begin(place);
        let mut taken = taken.unwrap();
        assert_eq!(&*taken.handle().params, "{}");
        assert_eq!(miss(&store, place), Miss::InUse);
        taken.set_spent(true);
        drop(taken);
        assert_eq!(miss(&store, place), Miss::InUse);
        drop(first);
        assert_eq!(miss(&store, place), Miss::Used);
        assert!(!store.in_use(&place));
    }

    #[test]
    fn a_handle_that_no_node_saw_goes_back_unless_a_newer_one_is_there() {
        let store = Arc::new(Store::new(LIMITS));
        let place = place("m", "c");
        put(&store, &place, "1");
        drop(store.begin(place).1.unwrap());
        let (_turn, taken) = store.begin(place);
        let taken = taken.unwrap();
        put(&store, &place, "2");
        drop(taken);
        let (_turn, taken) = store.begin(place);
        assert_eq!(&*taken.unwrap().handle().params, "2");
    }

    #[test]
    fn misses_have_reasons() {
        let store = Arc::new(Store::new(LIMITS));
        let place = place("m", "c");
        store.put_nothing(&place, Homes::default());
        assert_eq!(miss(&store, place), Miss::NoParams);
        assert!(!put(&store, &place, &"x".repeat(10_001)));
        assert_eq!(miss(&store, place), Miss::TooLarge);
        assert_eq!(miss(&store, self::place("other", "c")), Miss::OtherModel);
        assert_eq!(miss(&store, self::place("m", "d")), Miss::Unknown);

        let short = Arc::new(Store::new(Limits {
            ttl: Duration::ZERO,
            ..LIMITS
        }));
        put(&short, &place, "{}");
        assert_eq!(miss(&short, place), Miss::Expired);
    }

    #[test]
    fn the_oldest_make_room_by_count_and_by_bytes() {
        let store = Arc::new(Store::new(LIMITS));
        let places: Vec<_> = (0..150).map(|i| place("m", &i.to_string())).collect();
        for place in &places {
            put(&store, place, "{}");
        }
        assert!(store.held().0 <= 100);
        assert_eq!(miss(&store, places[0]), Miss::Evicted);
        assert!(store.begin(places[149]).1.is_ok());

        let store = Arc::new(Store::new(LIMITS));
        for place in &places {
            put(&store, place, &"x".repeat(9_000));
        }
        let (count, bytes) = store.held();
        assert!(count <= 11 && bytes <= 100_000, "{count} {bytes}");
        assert!(store.begin(places[149]).1.is_ok());
    }

    #[test]
    fn homes_outlive_the_handle() {
        let store = Arc::new(Store::new(LIMITS));
        let place = place("m", "c");
        let homes = Homes {
            prefill: Some(1),
            decode: Some(2),
        };
        store.put(&place, Handle::new("{}", HOLDER), homes);
        let mut taken = store.begin(place).1.unwrap();
        taken.set_spent(true);
        drop(taken);
        assert_eq!(store.homes(&place), homes);
    }
}
