//! One request from its arrival to its answer: a turn of a conversation.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use axum::extract::Request;
use axum::http::header::{self, HeaderName};
use axum::http::{HeaderMap, HeaderValue};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;

use crate::conversation::{ConversationId, Tenant};
use crate::error::ApiError;
use crate::history::History;
use crate::http::read_body;
use crate::legs::{Answer, Legs, Prefilled};
use crate::metrics::Outcome;
use crate::nodes::{NodeId, Role};
use crate::record::{Recorder, Subject};
use crate::relay::{Ending, Relay};
use crate::report::{self, Report, RouterReport};
use crate::request::{Api, ClientBody, REQUEST_ID, end_to_end, for_nodes};
use crate::server::Shared;
use crate::store::{Homes, Miss, Place, Taken, Turn};

/// Misses for want of params, in a row, after which something is likely to be set wrongly.
const NO_PARAMS_WARNING: u32 = 3;

/// Answers a request.
pub(crate) async fn answer(shared: Arc<Shared>, api: Api, request: Request) -> Response {
    let arrived = Instant::now();
    let mut ending = Ending::new(&shared);
    let (parts, body) = request.into_parts();
    let config = &shared.config;
    let body = read_body(
        &parts.headers,
        body,
        config.max_request_bytes,
        config.request_timeout,
    );
    let refused = |error: ApiError, ending: &mut Ending| {
        ending.set(Outcome::ClientError);
        error.into_response()
    };
    let body = match body.await {
        Ok(body) => body,
        Err(error) => return refused(error.into(), &mut ending),
    };
    let talk = match Talk::begin(&shared, api, &parts.headers, &body) {
        Ok(talk) => talk,
        Err(error) => return refused(error, &mut ending),
    };
    let request_id = format!("{:032x}", rand::random::<u128>());
    let mut response = talk
        .answer(&shared, api, &parts.headers, &request_id, arrived, ending)
        .await;
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        let name = HeaderName::from_static(REQUEST_ID);
        response.headers_mut().entry(name).or_insert(value);
    }
    response
}

/// A request, and what is known of its conversation.
struct Talk<'a> {
    body: ClientBody<'a>,
    id: ConversationId,
    history: Option<History>,
    turn: Turn,
    found: Result<Taken, Miss>,
    homes: Homes,
    /// Whether the answer's handle is of use.
    keep: bool,
}

impl<'a> Talk<'a> {
    fn begin(
        shared: &Arc<Shared>,
        api: Api,
        headers: &HeaderMap,
        body: &'a Bytes,
    ) -> Result<Self, ApiError> {
        let body = ClientBody::parse(body, api)?;
        let store = &shared.store;
        let tenant = Tenant::of(headers);
        let place = |id: &ConversationId| Place::new(&tenant, &body.model, id);
        let given = ConversationId::given(body.conversation.as_deref(), headers)?;
        let history = match given {
            Some(_) => None,
            None => History::of(api, body.fields(), &tenant, &body.model),
        };
        let recalled = match (&given, &history) {
            (None, Some(history)) => store.recall(&history.beginnings()),
            _ => None,
        };
        let known = given.or(recalled.clone().filter(|id| {
            // Two who said the same so far and speak at once are two conversations.
            let place = place(id);
            store.has(&place) || !store.in_use(&place)
        }));
        let unnamed = match (&known, recalled) {
            (Some(_), _) => None,
            (None, Some(_)) => Some(Miss::InUse),
            (None, None) => Some(Miss::NoConversation),
        };
        let id = known.unwrap_or_else(ConversationId::generated);
        let (turn, found) = store.begin(place(&id));
        let homes = store.homes(turn.place());
        let found = if !shared.config.bidirectional {
            Err(Miss::BidirectionalOff)
        } else if body.many_prompts {
            Err(Miss::ManyPrompts)
        } else if let Some(miss) = unnamed {
            Err(miss)
        } else {
            found.and_then(|taken| still_held(shared, taken))
        };
        Ok(Self {
            keep: shared.config.bidirectional && !body.many_prompts,
            body,
            id,
            history,
            turn,
            found,
            homes,
        })
    }

    async fn answer(
        self,
        shared: &Arc<Shared>,
        api: Api,
        headers: &HeaderMap,
        request_id: &str,
        arrived: Instant,
        mut ending: Ending,
    ) -> Response {
        let sent = for_nodes(headers, self.id.header_value(), request_id);
        let legs = Legs {
            shared,
            api,
            body: &self.body,
            headers: &sent,
            homes: self.homes,
        };
        let clients = self
            .body
            .params
            .as_deref()
            .filter(|_| shared.config.accept_kv_params);
        let (mut taken, miss) = match self.found {
            // What the client brought comes before what is remembered, which goes back unused.
            _ if clients.is_some() => (None, None),
            Ok(taken) => (Some(taken), None),
            Err(miss) => (None, Some(miss)),
        };
        count(shared, taken.as_ref(), miss);
        let prefilled = if self.body.many_prompts {
            None
        } else {
            match legs.prefill(taken.as_mut(), clients).await {
                Ok(prefilled) => prefilled,
                Err(whole) => {
                    ending.set(whole.outcome());
                    return whole.into_response();
                }
            }
        };
        match &prefilled {
            Some(prefilled) => shared.metrics.prefill.observe(prefilled.time.as_secs_f64()),
            None if self.body.many_prompts => {}
            None => shared.metrics.fell_back("decode_alone"),
        }
        let (answer, busy, by_prefill) = match legs.decode(prefilled.as_ref()).await {
            Ok(decoded) => decoded,
            Err(failure) => {
                ending.set(failure.outcome());
                return failure.into_response();
            }
        };
        if by_prefill {
            shared.metrics.fell_back("prefill_alone");
        }
        shared
            .metrics
            .first_byte
            .observe(arrived.elapsed().as_secs_f64());
        let holder = busy.node.id;
        let homes = homes(prefilled.as_ref(), holder);
        let report = report::wanted(headers).then(|| {
            let alone = match (by_prefill, &prefilled) {
                (true, _) => Some("prefill_alone"),
                (false, None) if !self.body.many_prompts => Some("decode_alone"),
                (false, _) => None,
            };
            Report {
                router: RouterReport {
                    hit: miss.is_none(),
                    miss_reason: miss.map(Miss::name),
                    prefill_node: prefilled.as_ref().map(|p| p.url.clone()),
                    decode_node: Some(busy.node.url.to_string()),
                    prefill_ms: prefilled.as_ref().map(|p| p.time.as_secs_f64() * 1e3),
                    fallback: alone,
                },
                prefill: prefilled.and_then(|p| p.report),
            }
        });
        let mut recorder = Recorder::new(Subject {
            shared: Arc::clone(shared),
            place: *self.turn.place(),
            turn: Some(self.turn),
            id: self.id,
            keep: self.keep,
            holder,
            homes,
            history: self.history,
            report,
        });
        match answer {
            Answer::Whole(mut whole) => {
                ending.set(whole.outcome());
                if whole.status.is_success()
                    && let Ok(text) = std::str::from_utf8(&whole.body)
                    && let Some(changed) = recorder.object(text)
                {
                    whole.body = changed.into();
                }
                whole.into_response()
            }
            Answer::Stream { response, first } => {
                let status = response.status();
                let sent = end_to_end(response.headers());
                let framed = response.headers().contains_key(header::TRANSFER_ENCODING)
                    || response.headers().contains_key(header::CONTENT_LENGTH);
                let body = Relay::body(response, first, recorder, busy, ending, framed);
                let mut response = Response::new(body);
                *response.status_mut() = status;
                *response.headers_mut() = sent;
                response
            }
        }
    }
}

/// Gives up a handle whose blocks went down with their node.
fn still_held(shared: &Shared, mut taken: Taken) -> Result<Taken, Miss> {
    let up = shared
        .node(taken.handle().holder)
        .is_some_and(|node| node.is_up());
    if !up {
        taken.set_spent(true);
        return Err(Miss::NodeGone);
    }
    Ok(taken)
}

fn homes(prefilled: Option<&Prefilled>, holder: NodeId) -> Homes {
    match holder.role {
        Role::Decode => Homes {
            prefill: prefilled.map(|p| p.node),
            decode: Some(holder.index),
        },
        Role::Prefill => Homes {
            prefill: Some(holder.index),
            decode: None,
        },
    }
}

fn count(shared: &Shared, taken: Option<&Taken>, miss: Option<Miss>) {
    if let Some(taken) = taken {
        shared.metrics.hits.inc();
        let age = taken.handle().age();
        shared.metrics.handle_age.observe(age.as_secs_f64());
        shared.no_params.store(0, Ordering::Relaxed);
    }
    let Some(miss) = miss else { return };
    shared.metrics.missed(miss.name());
    if miss == Miss::NoParams {
        let before = shared.no_params.fetch_add(1, Ordering::Relaxed);
        if before.saturating_add(1) == NO_PARAMS_WARNING {
            tracing::warn!(
                "the last {NO_PARAMS_WARNING} turns had no handle because decode nodes sent no \
                 kv_transfer_params with their answers: nothing is read back, every prompt is computed. \
                 Are the nodes set to bidirectional transfer, and do they send params in streams?"
            );
        }
    }
}
