//! Short-hands for tests that work on one key.

use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{PutStart, Recency};
use layercake_store::{
    GetSession, PutSession, Range, RangeRead, RangeWrite, ReadDone, StoreClient, StoreError,
};

use super::{buffer, contents, one, one_replica, pattern, whole};

/// Short-hands on one key.
pub(crate) trait OneKey {
    async fn start_put(&self, key: &ObjectKey, size: u64) -> Result<PutSession, StoreError>;
    async fn start_get(&self, key: &ObjectKey) -> Result<GetSession, StoreError>;
    async fn write(
        &self,
        session: &PutSession,
        offset: u64,
        bytes: &[u8],
    ) -> Result<u64, StoreError>;
    async fn read(
        &self,
        session: &GetSession,
        offset: u64,
        len: u64,
    ) -> Result<(ReadDone, Vec<u8>), StoreError>;
    async fn end(&self, session: PutSession) -> Result<(), StoreError>;
    async fn store(&self, key: &ObjectKey, bytes: &[u8]);
    async fn has(&self, key: &ObjectKey) -> bool;
    /// As [`has`](Self::has), where the master may be away.
    async fn look(&self, key: &ObjectKey) -> Result<bool, StoreError>;
    async fn load(&self, key: &ObjectKey) -> Result<Vec<u8>, StoreError>;
}

impl OneKey for StoreClient {
    async fn start_put(&self, key: &ObjectKey, size: u64) -> Result<PutSession, StoreError> {
        let entry = PutStart::new(key.clone(), size);
        one(self
            .start_puts(vec![entry], &one_replica(), Recency::default())
            .await)
    }

    async fn start_get(&self, key: &ObjectKey) -> Result<GetSession, StoreError> {
        one(self
            .start_gets(std::slice::from_ref(key), Recency::default())
            .await)
    }

    async fn write(
        &self,
        session: &PutSession,
        offset: u64,
        bytes: &[u8],
    ) -> Result<u64, StoreError> {
        let local = whole(&buffer(self.engine(), bytes.to_vec()));
        let ranges = vec![Range { offset, local }];
        one(self
            .write_ranges(vec![RangeWrite { session, ranges }])
            .await)
    }

    async fn read(
        &self,
        session: &GetSession,
        offset: u64,
        len: u64,
    ) -> Result<(ReadDone, Vec<u8>), StoreError> {
        let memory = buffer(self.engine(), pattern(u64::MAX, len));
        let ranges = vec![Range {
            offset,
            local: whole(&memory),
        }];
        let done = one(self.read_ranges(vec![RangeRead { session, ranges }]).await)?;
        Ok((done, contents(&memory)))
    }

    async fn end(&self, session: PutSession) -> Result<(), StoreError> {
        one(self.end_puts(vec![session]).await).map_err(|failure| failure.error)
    }

    async fn store(&self, key: &ObjectKey, bytes: &[u8]) {
        let put = one(self
            .put_bytes(&[(key.clone(), bytes)], &one_replica())
            .await);
        assert_eq!(
            put.expect("there is room"),
            layercake_store::PutOutcome::Stored
        );
    }

    async fn has(&self, key: &ObjectKey) -> bool {
        self.look(key).await.expect("the master is up")
    }

    async fn look(&self, key: &ObjectKey) -> Result<bool, StoreError> {
        one(self
            .exists(std::slice::from_ref(key), Recency::default())
            .await)
    }

    async fn load(&self, key: &ObjectKey) -> Result<Vec<u8>, StoreError> {
        one(self.get(std::slice::from_ref(key)).await).map(|bytes| bytes.to_vec())
    }
}
