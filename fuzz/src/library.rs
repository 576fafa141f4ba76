//! The decoders of the library.

use base64::Engine as _;
use bytes::{Bytes, BytesMut};
use kv_xfer::descriptor::{
    BlockIdsJson, BlockRuns, ClusterKey, DescriptorLimits, Params, SealedTicket,
};
use kv_xfer::engine::Notice;
use kv_xfer::layout::KvLayout;
use kv_xfer::peer::{CardPolicy, PeerAddr, PeerCard, decode_reply, encode_reply};
use kv_xfer::side_channel::seal::{Challenge, Demand, Seal};
use kv_xfer::side_channel::wire::{self, Request};
use kv_xfer::side_channel::zmtp::{self, Decoder, Event, Limits, ZmtpError};
use rmpv::Value;

/// A target: its name, which is that of its corpus, and what it does with bytes.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: &[Target] = &[
    ("descriptor_json", descriptor_json),
    ("ticket", ticket),
    ("runs", runs),
    ("card", card),
    ("request", request),
    ("reply", reply),
    ("zmtp", zmtp),
    ("notice", notice),
    ("layout", layout),
    ("address", address),
];

/// Tight limits, so that small inputs meet them.
fn limits() -> DescriptorLimits {
    DescriptorLimits {
        max_blocks: 4096,
        ..DescriptorLimits::default()
    }
}

fn key() -> ClusterKey {
    ClusterKey::from_secret(b"of-the-fuzzed-cluster").expect("long enough")
}

/// `kv_transfer_params`: both parsers agree, what is understood is written so that it is understood
/// again, and no tag is believed that was not made with the key.
pub fn descriptor_json(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let parsed = Params::from_json_str(text, &limits());
    if let Ok(value) = serde_json::from_str(text) {
        let other = Params::from_json_value(value, &limits());
        if let (Ok(one), Ok(other)) = (&parsed, &other) {
            assert_eq!(one, other);
        }
    }
    let Ok(params) = parsed else { return };
    let again = Params::from_json_value(params.to_json_value(BlockIdsJson::Expanded), &limits());
    if let Ok(again) = again {
        assert_eq!(params, again);
    }
    if let Params::Remote(remote) = params {
        let _ = remote.verify_ticket(None, None, None);
        let believed = remote.verify_ticket(Some(&key()), Some("tenant"), None);
        assert!(!matches!(believed, Ok(Some(_))), "a forged ticket");
        let _ = remote.check_token_count(16);
    }
}

/// A ticket, as the text and as the bytes within it: one ticket has one text.
pub fn ticket(data: &[u8]) {
    let text = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(data);
    let texts = [std::str::from_utf8(data).unwrap_or_default(), &text];
    for text in texts {
        if let Ok(sealed) = SealedTicket::parse(text, &limits()) {
            assert_eq!(sealed.to_text(), text);
            let ticket = sealed.unverified();
            assert!(ticket.runs.len() <= limits().max_blocks as usize);
            let _ = ticket.runs.check_within(100);
        }
    }
}

/// A block list: it has one form, and is as long as it says.
pub fn runs(data: &[u8]) {
    let Ok(runs) = BlockRuns::decode(data, &limits()) else {
        return;
    };
    assert!(runs.len() <= limits().max_blocks as usize);
    let mut again = Vec::new();
    runs.encode_into(&mut again);
    assert_eq!(again, data);
    assert_eq!(runs.iter().count(), runs.len());
    let half = runs.len() / 2;
    let slice = runs.slice(half..runs.len()).expect("in range");
    assert_eq!(slice.len(), runs.len() - half);
    assert_eq!(slice.iter().next(), runs.get(half));
}

/// A card: as it came, and with its checksum put right, so that what lies behind that is reached.
pub fn card(data: &[u8]) {
    let peer = PeerAddr::new("127.0.0.1", 7000).expect("an address");
    let lenient = CardPolicy {
        allow_unchecked: true,
        ..CardPolicy::default()
    };
    let keyed = CardPolicy {
        key: Some(key()),
        ..CardPolicy::default()
    };
    let decode = |bytes: &[u8]| {
        assert!(!matches!(
            decode_reply(&peer, bytes, &keyed),
            Ok(PeerCard::KvXfer(_))
        ));
        let card = decode_reply(&peer, bytes, &lenient);
        if let Ok(PeerCard::KvXfer(card)) = &card {
            let reply = encode_reply(card, None, &lenient.limits).expect("what was accepted");
            match decode_reply(&peer, &reply, &lenient) {
                Ok(PeerCard::KvXfer(again)) => assert_eq!(*card, again),
                other => panic!("{other:?}"),
            }
            let _ = KvLayout::from_bytes(&card.layout);
        }
    };
    decode(data);
    if let Some(sealed) = with_checksum(data) {
        decode(&sealed);
    }
}

fn with_checksum(data: &[u8]) -> Option<Vec<u8>> {
    let mut input = data;
    let value = rmpv::decode::read_value_with_max_depth(&mut input, 16).ok()?;
    let Value::Map(mut entries) = value else {
        return None;
    };
    let inner = entries
        .iter()
        .find(|(name, _)| name.as_str() == Some("agent_metadata_bytes"))
        .and_then(|(_, value)| value.as_slice())?;
    let sum = Value::Binary(blake3::hash(inner).as_bytes().to_vec());
    for (name, value) in &mut entries {
        if name.as_str() == Some("kv_xfer_checksum") {
            *value = sum.clone();
        }
    }
    let mut out = Vec::new();
    rmpv::encode::write_value(&mut out, &Value::Map(entries)).ok()?;
    Some(out)
}

/// A request on the side channel: with a key, nothing is done that was not signed for this challenge.
pub fn request(data: &[u8]) {
    let key = key();
    let challenge = Some(Challenge([7; 16]));
    if let Ok(request) = Request::decode(data, &Demand::default()) {
        let again = Request::decode(&request.encode(None), &Demand::default());
        assert_eq!(again, Ok(request));
    }
    for challenge in [challenge, None] {
        let demand = Demand {
            key: Some(&key),
            challenge,
        };
        let done = Request::decode(data, &demand);
        assert!(matches!(done, Err(_) | Ok(Request::Hello | Request::Ping)));
    }
    // What the client would send back to a challenge.
    if let Ok(challenge) = Challenge::decode(data) {
        let seal = Seal {
            key: &key,
            challenge,
        };
        let _ = Request::Card(kv_xfer::ids::Rank::default()).encode(Some(&seal));
    }
}

/// Every reply that a client reads.
pub fn reply(data: &[u8]) {
    let _ = wire::decode_clock(data).map(|secs| assert!(secs.is_finite()));
    let _ = wire::decode_pong(data);
    let _ = wire::decode_renewed(data);
    let _ = wire::decode_released(data);
    let _ = Challenge::decode(data);
    if let Some((reason, detail)) = wire::decode_refusal(data) {
        assert!(reason.chars().count() <= 256 && detail.chars().count() <= 256);
    }
}

fn events(pieces: &[&[u8]]) -> (Vec<Event>, Option<ZmtpError>) {
    let mut decoder = Decoder::new(Limits {
        max_message: 1000,
        max_parts: 4,
    });
    let (mut buf, mut events) = (BytesMut::new(), Vec::new());
    for piece in pieces {
        buf.extend_from_slice(piece);
        loop {
            match decoder.decode(&mut buf) {
                Ok(Some(event)) => events.push(event),
                Ok(None) => break,
                Err(error) => return (events, Some(error)),
            }
        }
    }
    (events, None)
}

/// A connection's bytes: the same events however they are cut, and none beyond the limits.
pub fn zmtp(data: &[u8]) {
    let greeting: Bytes = zmtp::greeting();
    let whole = [&greeting[..], data].concat();
    let (once, error) = events(&[&whole]);
    for event in &once {
        if let Event::Message(parts) = event {
            assert!(parts.len() <= 4 && parts.iter().map(Bytes::len).sum::<usize>() <= 1000);
        }
    }
    let bytewise: Vec<&[u8]> = whole.chunks(1).collect();
    assert_eq!((once, error), events(&bytewise));
    let _ = events(&[data]);
}

/// A reader's notice: with a key, none that was not signed.
pub fn notice(data: &[u8]) {
    if let Ok(notice) = Notice::decode(data, None) {
        assert_eq!(
            Notice::decode(&notice.encode(None), None).as_ref(),
            Ok(&notice)
        );
        let signed = notice.encode(Some(&key()));
        if matches!(notice, Notice::Release { .. }) {
            assert_eq!(Notice::decode(&signed, Some(&key())), Ok(notice));
        }
    }
    assert!(
        Notice::decode(data, Some(&key())).is_err(),
        "a forged notice"
    );
}

/// A layout.
pub fn layout(data: &[u8]) {
    if let Ok(layout) = KvLayout::from_bytes(data) {
        assert_eq!(layout.to_bytes(), data);
        let _ = (layout.content_fingerprint(), layout.chunks().len());
        let _ = layout.check_compatible(&layout);
    }
}

/// A host and a port, as they come in descriptors and settings.
pub fn address(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Ok(address) = PeerAddr::new(text, 7000) {
        let again = PeerAddr::new(&address.host(), address.port());
        assert_eq!(again.as_ref(), Ok(&address));
        let policy = kv_xfer::side_channel::DialPolicy::default();
        if policy.check(&address).is_ok() {
            let local = address.ip().map_or(address.host() == "localhost", |ip| {
                ip.to_canonical().is_loopback()
            });
            assert!(local, "{address} is dialled");
        }
    }
    let _: Result<kv_xfer::side_channel::Network, _> = text.parse();
}
