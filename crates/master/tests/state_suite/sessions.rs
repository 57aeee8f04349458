//! Put and get sessions of the state machine: who may read what, and until when.

use crate::harness::*;

#[test]
fn an_object_is_readable_from_commit_to_removal() {
    let world = World::new();
    let writer = world.client();
    let key = key("k");
    assert_eq!(world.presence(&key), Presence::Absent);
    let started = world.put(&writer, &key, 1000).unwrap();
    assert_eq!(world.presence(&key), Presence::Reserved);
    assert_eq!(world.get(&writer, &key).unwrap_err(), Refusal::NotReady);
    assert_eq!(world.commit(&writer, &key, &started), Ok(()));
    assert_eq!(world.presence(&key), Presence::Complete);
    let got = world.get(&writer, &key).unwrap();
    assert_eq!((got.size, &got.replicas), (1000, &started.replicas));
}
