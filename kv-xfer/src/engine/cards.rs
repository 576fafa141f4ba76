//! Cards over the side channel: fetching a peer's, and serving our own.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::config::EngineConfig;
use super::connect::{CardSource, ConnectError, FetchedPeer};
use super::error::StartError;
use super::holder::Holder;
use crate::clock::Clock;
use crate::descriptor::{Host, LeaseRef};
use crate::ids::{AgentName, EngineId, Incarnation, Rank};
use crate::layout::{KvLayout, RegionGeometry};
use crate::memory::KvPool;
use crate::peer::{
    Card, CardFault, CardLimits, CardPolicy, CompatFactors, Features, PROTOCOL_VERSION, PeerAddr,
    PeerCard, VllmFields, decode_reply, encode_reply,
};
use crate::side_channel::{
    Client, ClientConfig, DialPolicy, Dialable, Handler, Listeners, PingInfo, ReleaseOutcome,
    ReleaseRequest, RenewOutcome, RenewRequest, Server, ServerConfig, ServerError, ServerLimits,
    SideChannelError,
};

/// What both engines of a transfer must have in common.
fn factors(model: &str, layout: &KvLayout) -> CompatFactors {
    CompatFactors {
        protocol: PROTOCOL_VERSION,
        model: model.to_owned(),
        dtype: layout.model().dtype().name().to_owned(),
        block_tokens: layout.block_tokens(),
        layout_fingerprint: layout.content_fingerprint().0,
        extra: BTreeMap::from([("tp".to_owned(), layout.tp().to_string())]),
    }
}

/// The card of an engine rank.
pub(super) fn own_card(
    config: &EngineConfig,
    incarnation: Incarnation,
    pool: &KvPool,
    agent: AgentName,
    nixl_metadata: Vec<u8>,
    lease_words: RegionGeometry,
) -> Card {
    Card {
        engine_id: config.engine_id.clone(),
        incarnation,
        rank: config.rank,
        agent,
        nixl_metadata,
        regions: pool.regions().to_vec(),
        layout: pool.layout().to_bytes(),
        lease_words,
        compat: factors(&config.model, pool.layout()),
        compat_hash: None,
        features: Features::all(),
        vllm: VllmFields::default(),
    }
}

/// Cards of peers over their side channels, dialled only where the policy allows it.
#[derive(Debug)]
pub struct SideChannelCards {
    client: Client,
    dial: DialPolicy,
    policy: CardPolicy,
}

impl SideChannelCards {
    /// Fetches cards as this engine, and accepts those that fit its layout and key.
    #[must_use]
    pub fn new(config: &EngineConfig, layout: &KvLayout, clock: Arc<dyn Clock>) -> Self {
        let policy = CardPolicy {
            key: config.cluster_key.clone(),
            factors: Some(factors(&config.model, layout)),
            expect_rank: Some(config.rank),
            ..CardPolicy::default()
        };
        let client = Client::new(ClientConfig {
            max_reply: policy.limits.max_bytes,
            key: config.cluster_key.clone(),
            clock,
        });
        Self {
            client,
            dial: config.dial.clone(),
            policy,
        }
    }

    fn dialable(&self, address: &PeerAddr) -> Result<Dialable, ConnectError> {
        self.dial
            .check(address)
            .map_err(|refused| side_channel(address, refused.into()))
    }
}

fn side_channel(address: &PeerAddr, cause: SideChannelError) -> ConnectError {
    ConnectError::SideChannel {
        address: address.to_string(),
        cause: Arc::new(cause),
    }
}

impl CardSource for SideChannelCards {
    fn fetch(
        &self,
        address: &PeerAddr,
        rank: Rank,
        limit: Duration,
    ) -> Result<FetchedPeer, ConnectError> {
        let dialable = self.dialable(address)?;
        let fetched = self
            .client
            .fetch_card(&dialable, rank, limit)
            .map_err(|cause| side_channel(address, cause))?;
        match decode_reply(address, &fetched.bytes, &self.policy) {
            Ok(PeerCard::KvXfer(card)) => Ok(FetchedPeer {
                card: *card,
                offset: fetched.clock_offset(),
            }),
            Ok(_) => Err(ConnectError::Refused(format!(
                "{address} answers as a vLLM engine; its blocks cannot be verified, so they are not read"
            ))),
            Err(error) => Err(ConnectError::Card(Arc::new(error))),
        }
    }

    fn release(
        &self,
        address: &PeerAddr,
        incarnation: Incarnation,
        lease: LeaseRef,
        limit: Duration,
    ) -> Result<(), ConnectError> {
        let dialable = self.dialable(address)?;
        // Only kv-xfer engines make tickets, and all of them take releases.
        let request = ReleaseRequest {
            incarnation,
            lease: lease.id,
        };
        self.client
            .release(&dialable, Features::all(), request, limit)
            .map(|_| ())
            .map_err(|cause| side_channel(address, cause))
    }

    fn renew(
        &self,
        address: &PeerAddr,
        incarnation: Incarnation,
        lease: LeaseRef,
        extension: Duration,
        limit: Duration,
    ) -> Result<Option<Duration>, ConnectError> {
        let dialable = self.dialable(address)?;
        let request = RenewRequest {
            incarnation,
            lease: lease.id,
            extension,
        };
        let outcome = self
            .client
            .renew(&dialable, Features::all(), request, limit)
            .map_err(|cause| side_channel(address, cause))?;
        Ok(match outcome {
            RenewOutcome::Renewed { remaining } | RenewOutcome::Refused { remaining } => {
                Some(remaining)
            }
            RenewOutcome::UnknownLease | RenewOutcome::Restarted { .. } => None,
        })
    }
}

/// Answers on the side channel.
pub(crate) struct Answers {
    engine_id: EngineId,
    incarnation: Incarnation,
    rank: Rank,
    card: Bytes,
    holder: Arc<Holder>,
    clock: Arc<dyn Clock>,
}

impl Answers {
    pub(super) fn new(
        config: &EngineConfig,
        card: &Card,
        holder: &Arc<Holder>,
        clock: &Arc<dyn Clock>,
    ) -> Result<Self, StartError> {
        let encoded = encode_reply(card, config.cluster_key.as_ref(), &CardLimits::default())
            .map_err(|fault: CardFault| StartError::Card(fault.to_string()))?;
        Ok(Self {
            engine_id: config.engine_id.clone(),
            incarnation: card.incarnation,
            rank: config.rank,
            card: encoded.into(),
            holder: Arc::clone(holder),
            clock: Arc::clone(clock),
        })
    }
}

impl Handler for Answers {
    fn card(&self, rank: Rank) -> Option<Bytes> {
        (rank == self.rank).then(|| self.card.clone())
    }

    fn ping(&self) -> PingInfo {
        PingInfo {
            engine_id: self.engine_id.clone(),
            incarnation: self.incarnation,
        }
    }

    fn renew(&self, request: &RenewRequest) -> RenewOutcome {
        let incarnation = self.incarnation;
        if request.incarnation != incarnation {
            return RenewOutcome::Restarted { incarnation };
        }
        match self
            .holder
            .renew(request.lease, request.extension)
            .deadline()
        {
            Some(deadline) => RenewOutcome::Renewed {
                remaining: deadline.saturating_since(self.clock.now()),
            },
            None => RenewOutcome::UnknownLease,
        }
    }

    fn release(&self, request: &ReleaseRequest) -> ReleaseOutcome {
        let incarnation = self.incarnation;
        if request.incarnation != incarnation {
            return ReleaseOutcome::Restarted { incarnation };
        }
        if self.holder.release_by_id(request.lease) {
            ReleaseOutcome::Released
        } else {
            ReleaseOutcome::UnknownLease
        }
    }
}

/// Who lets readers ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Door {
    /// A side channel's server.
    Listen,
    /// Whoever has the engine asks it directly.
    #[allow(dead_code)]
    Direct,
}

/// A side channel, and the address that goes into descriptors.
pub(super) struct Serving {
    // Behind a lock only so that engines can be shared between threads.
    server: Option<parking_lot::Mutex<Server>>,
    advertised: PeerAddr,
    host: Host,
    port: NonZeroU16,
}

impl Serving {
    /// Starts the side channel: at what is bound, or at `bind` in name only.
    pub(super) fn start(
        config: &EngineConfig,
        bind: SocketAddr,
        answers: &Arc<Answers>,
        clock: &Arc<dyn Clock>,
        listeners: Option<Listeners>,
    ) -> Result<Self, StartError> {
        let (server, bound) = match listeners {
            None => (None, bind),
            Some(listeners) => {
                let server_config = ServerConfig {
                    bind: vec![bind],
                    limits: ServerLimits::default(),
                    key: config.cluster_key.clone(),
                    clock: Arc::clone(clock),
                };
                let handler = Arc::clone(answers) as Arc<dyn Handler>;
                let server = Server::serve(listeners, server_config, handler)?;
                let bound = server
                    .addrs()
                    .first()
                    .copied()
                    .ok_or(ServerError::NoAddress)?;
                (Some(parking_lot::Mutex::new(server)), bound)
            }
        };
        let name = match &config.holder.advertise_host {
            Some(name) => name.clone(),
            None if bound.ip().is_unspecified() => {
                return Err(StartError::Config(
                    "holder.bind is an unspecified address, which no peer can dial: set holder.advertise_host",
                ));
            }
            None => bound.ip().to_string(),
        };
        let malformed = "holder.advertise_host is not a host name or address";
        let advertised =
            PeerAddr::new(&name, bound.port()).map_err(|_| StartError::Config(malformed))?;
        let host = Host::new(&name).map_err(|_| StartError::Config(malformed))?;
        let port = NonZeroU16::new(bound.port())
            .ok_or(StartError::Config("the side channel is bound to port 0"))?;
        Ok(Self {
            server,
            advertised,
            host,
            port,
        })
    }

    pub(super) fn advertised(&self) -> &PeerAddr {
        &self.advertised
    }

    pub(super) fn host(&self) -> &Host {
        &self.host
    }

    pub(super) fn port(&self) -> NonZeroU16 {
        self.port
    }

    pub(super) fn stop(self) {
        drop(self.server);
    }
}
